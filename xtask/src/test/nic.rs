//! `cargo xtask test --nic`: transit on virtio's network cards, in a virtual machine with Debian's kernel 6.12. The test
//! itself is `e2e/tests/nic`, which plays the other droplets from outside of the machine.

use std::{
    fs,
    path::Path,
    process::{Command, ExitCode},
};

use anyhow::{Context, Result, bail};

use super::{
    NIC,
    binaries::{self, Binary},
    debian_kernel::{self, Kernel, SERIES},
    initramfs::Root,
};
use crate::{
    build::{root, run_command, step},
    deps::{self, program},
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

const INIT: &str = "#!/bin/busybox sh\n\
                    box=/bin/busybox\n\
                    export PATH=/bin THUBAN_PROGRAMS=/thuban-programs.o RUST_BACKTRACE=0\n\
                    $box mount -t proc proc /proc\n\
                    $box mount -t sysfs sysfs /sys\n\
                    $box mount -t devtmpfs devtmpfs /dev\n\
                    $box mount -t bpf bpf /sys/fs/bpf\n\
                    $box mount -t tmpfs tmpfs /run\n\
                    $box mount -t tmpfs tmpfs /tmp\n\
                    for module in /modules/*; do $box insmod $module; done\n\
                    nic guest\n\
                    $box poweroff -f\n";

/// Builds the machine's root and runs the test beside the machine.
pub fn run() -> Result<ExitCode> {
    if !nix::unistd::geteuid().is_root() {
        bail!("the tests make network namespaces and tap devices: run them as root");
    }
    deps::ensure()?;
    deps::ensure_more(&deps::KERNEL_PACKAGES)?;
    let object = step("eBPF programs", ebpf::build)?;
    let test = step("test", || binaries::build_test(NIC))?;
    let folder = root().join("target/kernel");
    fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
    let kernel = step(SERIES, || debian_kernel::fetch(&folder))?;
    let archive = folder.join("nic-root.cpio");
    step("root of the virtual machine", || {
        pack(&kernel, &test, &object, &folder)?.archive(&archive)
    })?;
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

/// Makes the machine's root: the test, the programs, `ip`, `ethtool`, modules, and a script that starts the test.
fn pack(kernel: &Kernel, test: &Binary, object: &Path, folder: &Path) -> Result<Root> {
    let root = Root::new(folder.join("nic-root"))?;
    root.add_base()?;
    for name in ["ip", "ethtool"] {
        root.program(&program(name)?, &format!("/bin/{name}"))?;
    }
    let stripped = folder.join(NIC);
    run_command(
        Command::new("strip")
            .arg("-o")
            .args([&stripped, &test.executable]),
    )?;
    root.program(&stripped, "/bin/nic")?;
    root.copy(object, "/thuban-programs.o")?;
    kernel.add_modules(&root, &MODULES)?;
    root.file("/init", INIT.as_bytes())?;
    Ok(root)
}
