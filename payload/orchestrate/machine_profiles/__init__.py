"""Programs, speed and memory of the machines that a run is planned for."""
