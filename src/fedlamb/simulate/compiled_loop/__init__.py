"""What the loop runs as compiled programs on a CPU: local steps and the test pass."""
