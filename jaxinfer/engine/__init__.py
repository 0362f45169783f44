"""Where the host meets the device: requests become padded batches, batches become tokens."""
