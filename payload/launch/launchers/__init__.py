"""One file a launcher; the file's name is what `launch.launcher` says."""
