"""From data to a fine-tuned model in one command: every setting chosen, printed, and run."""
