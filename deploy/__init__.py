"""Ways to bring the two services up. `local` starts both on this machine."""
