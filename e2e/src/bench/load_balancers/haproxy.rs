//! Debian's haproxy in the router's network namespace, which spreads connections over NodePorts.

use std::{
    fmt::Write,
    fs,
    net::Ipv4Addr,
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use thuban_cluster::router::INSIDE;

use super::site::Site;
use crate::bench::{node::Folder, process::end_with_owner};

/// The address at which it listens: the router's, as the client sees it.
pub const ADDRESS: Ipv4Addr = INSIDE;
const TIMEOUTS: &str = "timeout connect 3s\n timeout client 60s\n timeout server 60s";
/// How long it takes until it listens.
const START: Duration = Duration::from_millis(500);

/// A port, and the nodes' ports that take its connections.
pub struct Listen {
    pub port: u16,
    pub members: Vec<(Ipv4Addr, u16)>,
}

/// Ends with its owner.
pub struct Haproxy {
    child: Child,
    _folder: Folder,
}

impl Haproxy {
    /// Starts it with a thread on each core, and with the priority that client and servers have.
    pub fn start(site: &Site, listens: &[Listen]) -> Result<Self> {
        let folder = Folder::new("haproxy")?;
        let file = folder.path().join("haproxy.cfg");
        let threads = thread::available_parallelism()?;
        let mut text =
            format!("global\n maxconn 8000\n nbthread {threads}\ndefaults\n mode tcp\n {TIMEOUTS}\n");
        for Listen { port, members } in listens {
            write!(
                text,
                "listen port-{port}\n bind {ADDRESS}:{port}\n balance roundrobin\n"
            )?;
            for (number, (node, node_port)) in members.iter().enumerate() {
                writeln!(text, " server node-{number} {node}:{node_port}")?;
            }
        }
        fs::write(&file, text).with_context(|| format!("writing {}", file.display()))?;
        let mut command = Command::new("nsenter");
        command
            .arg(format!("--net={}", site.router.path().display()))
            .args(["chrt", "-f", "1", "haproxy", "-db", "-f"])
            .arg(&file)
            .stdin(Stdio::null());
        end_with_owner(&mut command);
        let child = command.spawn().context("starting haproxy")?;
        let mut haproxy = Self {
            child,
            _folder: folder,
        };
        thread::sleep(START);
        if let Some(status) = haproxy.child.try_wait()? {
            bail!("haproxy has ended: {status}");
        }
        Ok(haproxy)
    }
}

impl Drop for Haproxy {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
