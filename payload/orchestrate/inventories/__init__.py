"""Which machines a command is about, and whether a run can be placed on them."""
