"""What a module is and does, for people: explanations, memory, graphs for other tools."""
