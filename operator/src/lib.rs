//! The light operator: workflows of VPC, Network, Endpoint, Divider, Bouncer and Droplet.
//!
//! `model` decides, `controller` reads and writes objects, `stream` serves droplets, `hub` joins the three.

pub mod controller;
pub mod hub;
pub mod leader;
pub mod metrics;
pub mod model;
pub mod stream;
pub mod traces;

pub use thuban_telemetry::rate_limit;
