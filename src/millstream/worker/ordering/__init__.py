"""What is different between workers without order, by key, by stream and by partition."""
