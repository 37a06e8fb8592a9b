"""What runs at Cloudflare: the Worker that ships with duly."""
