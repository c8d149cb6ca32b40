"""The protocol carried by NVFlare: controller, executor, job folder, sessions.  The only imports of it, with provisioning."""
