"""What the loop runs as compiled programs on a CPU: local steps, full gradients, the test pass."""
