"""One file per launcher; the file's name is the value of `launch.launcher`."""
