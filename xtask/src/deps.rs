//! The programs that builds and clusters need: finds missing ones by their files, and installs them.
//!
//! Only Debian's packages are installed, by root. On other systems the error names what to install. etcd and Kubernetes
//! are built from source instead (`kube.rs`).

use std::{
    env, fs, iter,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use crate::build::{cargo, run_command};

/// A package, and what shows that it is there: a program in PATH, or a file.
pub struct Package {
    name: &'static str,
    sign: &'static str,
}

const PACKAGES: [Package; 22] = [
    // A DNS server that takes the names of load balancers.
    Package {
        name: "bind9",
        sign: "named",
    },
    Package {
        name: "binutils",
        sign: "strip",
    },
    Package {
        name: "bpftool",
        sign: "bpftool",
    },
    Package {
        name: "containerd",
        sign: "containerd",
    },
    Package {
        name: "containernetworking-plugins",
        sign: "/usr/lib/cni/loopback",
    },
    // Reads the operator's metrics by TLS.
    Package {
        name: "curl",
        sign: "curl",
    },
    Package {
        name: "ethtool",
        sign: "ethtool",
    },
    // A router for load balancers.
    Package {
        name: "frr",
        sign: "/usr/lib/frr/bgpd",
    },
    Package {
        name: "gcc",
        sign: "cc",
    },
    // A driver of load balancers, which is in their image, too.
    Package {
        name: "haproxy",
        sign: "haproxy",
    },
    Package {
        name: "iproute2",
        sign: "ip",
    },
    Package {
        name: "iptables",
        sign: "iptables",
    },
    Package {
        name: "libc6-dev",
        sign: "/usr/lib/x86_64-linux-gnu/libc.a",
    },
    Package {
        name: "nftables",
        sign: "nft",
    },
    Package {
        name: "openssl",
        sign: "openssl",
    },
    Package {
        name: "procps",
        sign: "sysctl",
    },
    Package {
        name: "protobuf-compiler",
        sign: "protoc",
    },
    Package {
        name: "runc",
        sign: "runc",
    },
    Package {
        name: "strace",
        sign: "strace",
    },
    Package {
        name: "tcpdump",
        sign: "tcpdump",
    },
    Package {
        name: "util-linux",
        sign: "nsenter",
    },
    Package {
        name: "ca-certificates",
        sign: "/etc/ssl/certs/ca-certificates.crt",
    },
];

/// The packages that build the eBPF programs where rustup has no nightly compiler with its source.
const EBPF_PACKAGES: [Package; 4] = [
    Package {
        name: "rustc-web",
        sign: "/var/lib/dpkg/info/rustc-web.list",
    },
    Package {
        name: "cargo-web",
        sign: "/var/lib/dpkg/info/cargo-web.list",
    },
    Package {
        name: "rust-web-src",
        sign: "/usr/lib/rustlib/src/rust/library/core/Cargo.toml",
    },
    Package {
        name: "llvm-22-dev",
        sign: LLVM_LIBRARY,
    },
];
/// Debian's folder of LLVM.
pub const LLVM: &str = "/usr/lib/llvm-22";
const LLVM_LIBRARY: &str = "/usr/lib/llvm-22/lib/libLLVM.so";

/// The packages that compile and link for arm64 on an x86-64 machine. ring and jemalloc have C.
pub const ARM64_PACKAGES: [Package; 3] = [
    Package {
        name: "binutils-aarch64-linux-gnu",
        sign: "aarch64-linux-gnu-strip",
    },
    Package {
        name: "gcc-aarch64-linux-gnu",
        sign: "aarch64-linux-gnu-gcc",
    },
    Package {
        name: "libc6-dev-arm64-cross",
        sign: "/usr/aarch64-linux-gnu/lib/libc.a",
    },
];

/// What starts programs of arm64 on an x86-64 machine.
pub const EMULATION_PACKAGES: [Package; 1] = [Package {
    name: "qemu-user",
    sign: "qemu-aarch64",
}];

/// The packages that make the traffic of benchmarks.
pub const TRAFFIC_PACKAGES: [Package; 1] = [Package {
    name: "iperf3",
    sign: "iperf3",
}];

/// The judge of alerts.
pub const ALERT_PACKAGES: [Package; 1] = [Package {
    name: "prometheus",
    sign: "promtool",
}];

/// The compiler of Cilium's programs. Debian 12's own version 14 is too old for them.
pub const CILIUM_PACKAGES: [Package; 1] = [Package {
    name: "clang-22",
    sign: CLANG,
}];
pub const CLANG: &str = "/usr/bin/clang-22";

/// The packages that run a virtual machine with another kernel.
pub const KERNEL_PACKAGES: [Package; 3] = [
    Package {
        name: "busybox-static",
        sign: "/bin/busybox",
    },
    Package {
        name: "qemu-system-x86",
        sign: "qemu-system-x86_64",
    },
    Package {
        name: "xz-utils",
        sign: "xz",
    },
];

/// The browser of the page's tests.
pub const BROWSER_PACKAGES: [Package; 1] = [Package {
    name: "chromium",
    sign: "chromium",
}];

/// What builds the page of thuban-observe.
pub const PAGE_PACKAGES: [Package; 2] = [
    Package {
        name: "nodejs",
        sign: "node",
    },
    Package {
        name: "npm",
        sign: "npm",
    },
];

/// What Kubernetes' own tests run in their pods.
pub const POD_PACKAGES: [Package; 5] = [
    Package {
        name: "bind9-dnsutils",
        sign: "/usr/bin/dig",
    },
    Package {
        name: "busybox-static",
        sign: "/bin/busybox",
    },
    Package {
        name: "curl",
        sign: "/usr/bin/curl",
    },
    Package {
        name: "netcat-openbsd",
        sign: "/bin/nc.openbsd",
    },
    // Debian's busybox can't limit the time of its wget.
    Package {
        name: "wget",
        sign: "/usr/bin/wget",
    },
];

/// Installs what is missing; takes no time when nothing is.
pub fn ensure() -> Result<()> {
    let missing = missing();
    if !missing.is_empty() {
        install(&missing)?;
        let left = self::missing();
        if !left.is_empty() {
            bail!(
                "{} is installed, but not found: is /usr/sbin in PATH?",
                left.join(" ")
            );
        }
    }
    bpf_linker().map(|_| ())
}

/// Installs packages that a command needs beside those of [`ensure`].
pub fn ensure_more(packages: &[Package]) -> Result<()> {
    let missing: Vec<&str> = packages
        .iter()
        .filter(|package| !is_there(package.sign))
        .map(|package| package.name)
        .collect();
    if missing.is_empty() {
        Ok(())
    } else {
        install(&missing)
    }
}

fn missing() -> Vec<&'static str> {
    let ebpf: &[Package] = if has_nightly_source() { &[] } else { &EBPF_PACKAGES };
    let missing = PACKAGES
        .iter()
        .chain(ebpf)
        .filter(|package| !is_there(package.sign));
    missing.map(|package| package.name).collect()
}

fn install(packages: &[&str]) -> Result<()> {
    let list = packages.join(" ");
    if !is_there("apt-get") {
        bail!("missing programs and no apt-get: install what your system calls {list}");
    }
    if !nix::unistd::geteuid().is_root() {
        bail!("missing packages: run as root, or run `apt-get install {list}`");
    }
    println!("installing {list}");
    let apt = || {
        let mut command = Command::new("apt-get");
        command.env("DEBIAN_FRONTEND", "noninteractive").arg("-q");
        command
    };
    run_command(apt().arg("update"))?;
    let policy = StartPolicy::forbid()?;
    run_command(
        apt()
            .args(["install", "-y", "--no-install-recommends"])
            .args(packages),
    )?;
    drop(policy);
    // The policy holds until the machine's next start only.
    if packages.contains(&"bind9") && is_there("systemctl") {
        let _ = Command::new("systemctl")
            .args(["disable", "--quiet", "named"])
            .status();
    }
    Ok(())
}

/// Keeps packages from starting their daemons while it lives (nobody would use containerd's).
struct StartPolicy {
    path: Option<PathBuf>,
}

impl StartPolicy {
    fn forbid() -> Result<Self> {
        let path = PathBuf::from("/usr/sbin/policy-rc.d");
        if path.exists() {
            return Ok(Self { path: None });
        }
        // 101: action forbidden by policy (Debian's policy-rc.d interface).
        fs::write(&path, "#!/bin/sh\nexit 101\n").with_context(|| format!("writing {}", path.display()))?;
        let policy = Self {
            path: Some(path.clone()),
        };
        fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
        Ok(policy)
    }
}

impl Drop for StartPolicy {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            let _ = fs::remove_file(path);
        }
    }
}

/// Returns the path of the program that links eBPF programs.
pub fn bpf_linker() -> Result<PathBuf> {
    cargo_tool("bpf-linker", |install| {
        if !Path::new(LLVM_LIBRARY).exists() {
            return Ok(());
        }
        let path = env::var_os("PATH").unwrap_or_default();
        let folders = iter::once(Path::new(LLVM).join("bin")).chain(env::split_paths(&path));
        install
            .args(["--no-default-features", "--features", "llvm-22"])
            .env("LLVM_PREFIX", LLVM)
            .env("PATH", env::join_paths(folders).context("PATH")?);
        Ok(())
    })
}

/// Returns the path of the program that checks the dependencies' licences and sources.
pub fn cargo_deny() -> Result<PathBuf> {
    cargo_tool("cargo-deny", |_| Ok(()))
}

/// Returns the path of a program of crates.io, from PATH or from cargo's folder. Installs it when it is in neither.
fn cargo_tool(name: &str, set_up: impl FnOnce(&mut Command) -> Result<()>) -> Result<PathBuf> {
    if let Ok(found) = program(name) {
        return Ok(found);
    }
    let place = cargo_home()?.join("bin").join(name);
    if !place.exists() {
        println!("installing {name}");
        let mut install = cargo();
        install.args(["install", name, "--locked"]);
        set_up(&mut install)?;
        run_command(&mut install)?;
    }
    Ok(place)
}

/// Whether a sign is there: a path must exist, a name must be a file in a folder of PATH.
fn is_there(sign: &str) -> bool {
    if sign.starts_with('/') {
        return Path::new(sign).exists();
    }
    program(sign).is_ok()
}

/// Returns the path of a program in PATH.
pub fn program(name: &str) -> Result<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let mut places = env::split_paths(&path).map(|folder| folder.join(name));
    let place = places.find(|place| place.is_file());
    place.with_context(|| format!("{name} is in no folder of PATH"))
}

fn home_folder(variable: &str, name: &str) -> Result<PathBuf> {
    if let Some(path) = env::var_os(variable) {
        return Ok(path.into());
    }
    Ok(
        PathBuf::from(env::var_os("HOME").with_context(|| format!("neither {variable} nor HOME is set"))?)
            .join(name),
    )
}

fn cargo_home() -> Result<PathBuf> {
    home_folder("CARGO_HOME", ".cargo")
}

/// Whether Debian's compiler is there, which [`ensure`] installs if rustup has no nightly.
pub fn has_debian_rust() -> bool {
    is_there("/var/lib/dpkg/info/rustc-web.list")
}

/// Whether rustup has a nightly compiler with the source of `core`. Asks the file system, because rustup is slow.
pub fn has_nightly_source() -> bool {
    let Ok(rustup) = home_folder("RUSTUP_HOME", ".rustup") else {
        return false;
    };
    let Ok(toolchains) = fs::read_dir(rustup.join("toolchains")) else {
        return false;
    };
    toolchains.flatten().any(|toolchain| {
        toolchain
            .file_name()
            .to_string_lossy()
            .starts_with("nightly-x86_64")
            && toolchain
                .path()
                .join("lib/rustlib/src/rust/library/core/Cargo.toml")
                .exists()
    })
}
