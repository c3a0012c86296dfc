"""The compressed cache that attention reads while tokens are generated."""
