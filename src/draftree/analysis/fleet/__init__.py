"""Discrete-event simulation of servers: replicas, batches, network delay and many clients. No torch."""
