"""Is every node fit for a run? Looks, tries the launcher, and reports findings."""
