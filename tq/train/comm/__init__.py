"""The wire of the compressed collectives: layout of messages, channels, agreement between ranks, and the pipeline."""
