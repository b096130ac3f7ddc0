//! The server that droplets dial: TLS, proof of the node, one stream for each droplet.

mod body;
pub mod door;
pub mod server;
mod service;
pub mod tls;

#[cfg(test)]
mod tests;
