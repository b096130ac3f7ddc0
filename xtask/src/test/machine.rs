//! The virtual machines that `--kernel` and `--nic` test in: Debian's kernel, and a root of one test binary with what
//! it needs.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use super::{
    binaries::Binary,
    debian_kernel::{self, Kernel, SERIES},
    initramfs::Root,
};
use crate::{
    build::{root, run_command, step},
    deps::{self, program},
};

/// What the root of a machine has besides busybox, the eBPF object and the test.
pub struct Machine<'a> {
    /// The name of the test in `/bin`, and of the root's files.
    pub name: &'a str,
    /// Programs of this machine.
    pub programs: &'a [&'a str],
    /// The kernel's modules, in the order in which they are loaded.
    pub modules: &'a [&'a str],
    /// The lines of shell that run the test. Busybox is `$box`.
    pub script: String,
}

/// Installs what a machine needs. Only root may run the tests: `why` says what for.
pub fn ensure(why: &str) -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        bail!("the tests {why}: run them as root");
    }
    deps::ensure()?;
    deps::ensure_more(&deps::KERNEL_PACKAGES)
}

impl Machine<'_> {
    /// Downloads the kernel unless it is there, and packs the root. Returns the kernel and the root's archive.
    pub fn prepare(&self, test: &Binary, object: &Path) -> Result<(Kernel, PathBuf)> {
        let folder = root().join("target/kernel");
        fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
        let kernel = step(SERIES, || debian_kernel::fetch(&folder))?;
        let archive = folder.join(format!("{}-root.cpio", self.name));
        step("root of the virtual machine", || {
            self.pack(&kernel, test, object, &folder)?.archive(&archive)
        })?;
        Ok((kernel, archive))
    }

    fn pack(&self, kernel: &Kernel, test: &Binary, object: &Path, folder: &Path) -> Result<Root> {
        let root = Root::new(folder.join(format!("{}-root", self.name)))?;
        root.add_base()?;
        for name in self.programs {
            root.program(&program(name)?, &format!("/bin/{name}"))?;
        }
        let stripped = folder.join(self.name);
        run_command(
            Command::new("strip")
                .arg("-o")
                .args([&stripped, &test.executable]),
        )?;
        root.program(&stripped, &format!("/bin/{}", self.name))?;
        root.copy(object, "/thuban-programs.o")?;
        kernel.add_modules(&root, self.modules)?;
        root.file("/init", self.init().as_bytes())?;
        Ok(root)
    }

    /// Returns the script that the kernel starts.
    fn init(&self) -> String {
        let script = &self.script;
        format!(
            "#!/bin/busybox sh\n\
             box=/bin/busybox\n\
             export PATH=/bin THUBAN_PROGRAMS=/thuban-programs.o RUST_BACKTRACE=0\n\
             $box mount -t proc proc /proc\n\
             $box mount -t sysfs sysfs /sys\n\
             $box mount -t devtmpfs devtmpfs /dev\n\
             $box mount -t bpf bpf /sys/fs/bpf\n\
             $box mount -t tmpfs tmpfs /run\n\
             $box mount -t tmpfs tmpfs /tmp\n\
             for module in /modules/*; do $box insmod $module; done\n\
             {script}\
             $box poweroff -f\n"
        )
    }
}
