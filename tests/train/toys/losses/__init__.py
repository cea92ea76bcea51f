"""A folder of losses, with the toy alone."""
