//! A real Kubernetes cluster on one Linux machine: etcd, API server, controller manager and scheduler in the root
//! network namespace, and three nodes, each with its own network, mount, UTS and PID namespaces, containerd and
//! kubelet.
//!
//! Everything of an instance is found by its name: cgroups, network namespaces, links and one state folder. So an
//! instance can be taken down even if the process that brought it up is gone.

pub mod bare;
mod cgroups;
pub mod command;
mod control_plane;
mod handle;
mod instance;
mod lifecycle;
mod mount_points;
pub mod namespace;
mod network;
mod node;
mod pki;
pub mod relay;
pub mod router;
mod tasks;
mod uplink;
pub mod wait;

pub use cgroups::Stay;
pub use control_plane::COMPONENTS;
pub use handle::Cluster;
pub use instance::{Instance, NODES};
pub use lifecycle::{Options, Status, down, env, exec, status, up};
pub use tasks::Tasks;
