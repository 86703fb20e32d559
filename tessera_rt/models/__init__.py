"""Models that hand their forward pass to the engine as tasks."""
