"""The protocol carried by NVFlare: controller, executor, job folder."""
