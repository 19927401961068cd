"""The same model behind other servers, as their documentation does it. They need the extra `peers`, best in an environment of its own."""
