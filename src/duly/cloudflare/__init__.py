"""The Cloudflare Worker that duly ships."""
