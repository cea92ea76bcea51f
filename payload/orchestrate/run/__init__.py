"""What is known of runs: their folders and copies, following them, and printing."""
