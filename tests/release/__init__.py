"""The sdist and the wheel, built and tried where nothing else of gradc is."""
