//! `cargo xtask test --nic`: transit on virtio's network cards, in a virtual machine with Debian's kernel 6.12. The
//! test itself is `e2e/tests/nic`, which plays the other droplets from outside of the machine.

use std::process::{Command, ExitCode};

use anyhow::{Context, Result};

use super::{
    NIC, binaries,
    machine::{self, Machine},
};
use crate::{
    build::{root, step},
    ebpf,
};

/// Modules that the machine needs, in the order in which they are loaded.
const MODULES: [&str; 9] = [
    "net/core/failover.ko.xz",
    "drivers/net/net_failover.ko.xz",
    "drivers/net/virtio_net.ko.xz",
    "drivers/net/veth.ko.xz",
    "net/ipv4/udp_tunnel.ko.xz",
    "net/ipv6/ip6_udp_tunnel.ko.xz",
    "drivers/net/vxlan/vxlan.ko.xz",
    "net/sched/sch_ingress.ko.xz",
    "net/sched/cls_bpf.ko.xz",
];

/// Builds the machine's root and runs the test beside the machine.
pub fn run() -> Result<ExitCode> {
    machine::ensure("make network namespaces and tap devices")?;
    let object = step("eBPF programs", ebpf::build)?;
    let test = step("test", || binaries::build_test(NIC))?;
    let machine = Machine {
        name: NIC,
        programs: &["ip", "ethtool"],
        modules: &MODULES,
        script: format!("{NIC} guest\n"),
    };
    let (kernel, archive) = machine.prepare(&test, &object)?;
    let status = step("virtual machine", || {
        Command::new(&test.executable)
            .current_dir(root())
            .arg("host")
            .arg("--kernel")
            .arg(&kernel.image)
            .arg("--root")
            .arg(&archive)
            .status()
            .with_context(|| format!("starting {}", test.executable.display()))
    })?;
    Ok(if status.success() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
