//! The images for arm64, built on an x86-64 machine.
//!
//! Rust's standard library for arm64 is rustup's (`rustup target add aarch64-unknown-linux-gnu`) or, where rustup has
//! none, Debian's for Debian's compiler. C is compiled, and everything linked, by Debian's gcc for arm64. Debian's
//! packages of arm64 (nft, its libraries, the standard library) are unpacked in `target/arm64`, never installed.
//!
//! The eBPF object is the same file on both platforms: both are little-endian, its programs read no registers of the
//! CPU, and transitd takes offsets of the kernel's structures from the node's own BTF.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};
use thuban_cluster::command::output;

use crate::{
    build::{self, Profile, cargo, cargo_at, root, run_command, step, stripped_for},
    deps, ebpf, flow_relay, load_balancers, page,
    platform::Platform,
};

const PLATFORM: Platform = Platform::Arm64;
pub const STRIP: &str = "aarch64-linux-gnu-strip";
const LINKER: &str = "aarch64-linux-gnu-gcc";
/// The loader of arm64's dynamic programs. It must be in /lib.
const LOADER: &str = "ld-linux-aarch64.so.1";
/// Where Debian's packages have libraries. The first folder is also that of images.
const LIBRARIES: [&str; 4] = [
    "lib/aarch64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "lib",
    "usr/lib",
];
const STANDARD_LIBRARY: &str = "libstd-rust-web-dev";

/// Builds the images of arm64 that are out of date.
pub fn images() -> Result<()> {
    ensure!(
        Platform::own() == Platform::Amd64,
        "images for another platform are built on x86-64 machines only"
    );
    deps::ensure()?;
    deps::ensure_more(&deps::ARM64_PACKAGES)?;
    let debian = step("Debian's packages of arm64", Debian::ensure)?;
    step("page of thuban-observe", page::build)?;
    let binaries = step("binaries for arm64", || compile(&debian))?;
    let object = step("eBPF programs", ebpf::build)?;
    step("images for arm64", || make_images(&debian, &binaries, &object))
}

fn make_images(debian: &Debian, binaries: &Path, object: &Path) -> Result<()> {
    let folder = Profile::Release.images_for(PLATFORM);
    let work = folder.join("files");
    fs::create_dir_all(&work).with_context(|| format!("making {}", work.display()))?;
    let copy = |name: &str, how: &str| stripped_for(PLATFORM, &binaries.join(name), &work.join(name), how);
    let made = build::own_images(
        copy("thuban-operator", "--strip-debug")?,
        copy("transitd", "--strip-debug")?,
        copy("thuban", "--strip-all")?,
        copy("thuban-connectivity", "--strip-debug")?,
        object,
        debian.with_libraries("nft")?,
    );
    for image in &made {
        let path = image.write_for(PLATFORM, &folder)?;
        println!("  {}: {}", image.name, path.display());
    }
    let path = load_balancers::archive_of(PLATFORM, binaries, &work, &folder)?;
    println!("  {}", path.display());
    let path = flow_relay::archive_of(PLATFORM, binaries, &work, &folder)?;
    println!("  {}", path.display());
    Ok(())
}

/// Folder of everything that is made on the way to the images.
fn work() -> PathBuf {
    root().join("target").join(PLATFORM.architecture())
}

/// Builds the binaries of all images; returns their folder.
fn compile(debian: &Debian) -> Result<PathBuf> {
    // Another compiler in the usual folder would make each of them build everything again.
    let folder = work().join("cargo");
    let target = PLATFORM.target();
    let packages = [
        &build::PACKAGES[..],
        &load_balancers::PACKAGES,
        &flow_relay::PACKAGES,
    ]
    .concat();
    let mut command = if has_standard_library()? {
        cargo()
    } else {
        let mut command = cargo_at(ebpf::DEBIAN_CARGO);
        let sysroot = debian.root().join("usr");
        let flags = serde_json::json!(["--sysroot", sysroot]);
        command
            .env("RUSTC", ebpf::DEBIAN_RUSTC)
            .arg("--config")
            .arg(format!("target.{target}.rustflags={flags}"));
        command
    };
    for inherited in [
        "RUSTFLAGS",
        "CARGO_ENCODED_RUSTFLAGS",
        "CARGO_BUILD_TARGET",
        "CARGO_TARGET_DIR",
        "RUSTC_WORKSPACE_WRAPPER",
    ] {
        command.env_remove(inherited);
    }
    command
        .current_dir(root())
        .env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", LINKER)
        // Some kernels for arm64 have pages of 64 KiB, and jemalloc refuses larger pages than it was built for.
        .env("JEMALLOC_SYS_WITH_LG_PAGE", "16")
        .args(["build", "--release", "--target", target, "--target-dir"])
        .arg(&folder)
        .args(packages.iter().flat_map(|package| ["-p", *package]));
    run_command(&mut command)?;
    Ok(folder.join(target).join("release"))
}

/// Whether the compiler of rust-toolchain.toml has the standard library for arm64. If not, Debian's compiler must be
/// there.
fn has_standard_library() -> Result<bool> {
    let output = Command::new("rustc")
        .current_dir(root())
        .args(["--print", "target-libdir", "--target", PLATFORM.target()])
        .output()
        .context("starting rustc")?;
    let folder = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    if output.status.success() && Path::new(&folder).is_dir() {
        return Ok(true);
    }
    if deps::has_debian_rust() {
        return Ok(false);
    }
    bail!(
        "no standard library for arm64: run `rustup target add {}`",
        PLATFORM.target()
    )
}

/// Packages of arm64, unpacked in a folder.
struct Debian {
    folder: PathBuf,
}

impl Debian {
    /// Downloads and unpacks the packages, unless it was done since this machine's own ones changed.
    fn ensure() -> Result<Self> {
        let debian = Self {
            folder: work().join("debian"),
        };
        let versions = versions(&["libc6", "libnftables1", "nftables", "rustc-web"])?;
        let complete = debian.folder.join("complete");
        if fs::read_to_string(&complete).ok().as_ref() == Some(&versions) {
            return Ok(debian);
        }
        remove(&debian.folder)?;
        // Files of packages are as old as the packages, so archives of images would seem to be current.
        remove(&Profile::Release.images_for(PLATFORM))?;
        debian.fill()?;
        fs::write(&complete, versions).with_context(|| format!("writing {}", complete.display()))?;
        Ok(debian)
    }

    fn root(&self) -> PathBuf {
        self.folder.join("root")
    }

    fn fill(&self) -> Result<()> {
        let archives = self.folder.join("cache/archives");
        let folders = [
            self.folder.join("lists/partial"),
            archives.join("partial"),
            self.root(),
        ];
        for folder in folders {
            fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
        }
        let status = self.folder.join("status");
        fs::write(&status, "").with_context(|| format!("writing {}", status.display()))?;
        run_command(self.apt().arg("update"))?;
        run_command(self.apt().args([
            "install",
            "-y",
            "--download-only",
            "--no-install-recommends",
            "nftables",
        ]))?;
        if !has_standard_library()? {
            // Not by `install`: what it depends on is the compiler's, and runs on this machine.
            let package = format!("{STANDARD_LIBRARY}={}", versions(&["rustc-web"])?.trim());
            run_command(self.apt().current_dir(&archives).args(["download", &package]))?;
        }
        for entry in fs::read_dir(&archives).with_context(|| format!("listing {}", archives.display()))? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "deb") {
                run_command(Command::new("dpkg-deb").arg("-x").arg(&path).arg(self.root()))?;
            }
        }
        Ok(())
    }

    /// Returns apt for arm64, with lists and a state of its own. It needs no root.
    fn apt(&self) -> Command {
        let own = |setting: &str, place: &str| format!("{setting}={}", self.folder.join(place).display());
        let settings = [
            "APT::Architecture=arm64".to_owned(),
            "APT::Architectures::=arm64".to_owned(),
            "APT::Sandbox::User=root".to_owned(),
            "Debug::NoLocking=1".to_owned(),
            own("Dir::State::Lists", "lists"),
            own("Dir::State::status", "status"),
            own("Dir::Cache", "cache"),
        ];
        let mut apt = Command::new("apt-get");
        apt.arg("-q");
        for setting in settings {
            apt.arg("-o").arg(setting);
        }
        apt
    }

    /// Returns a program as /bin/NAME, and the libraries that it loads.
    fn with_libraries(&self, name: &str) -> Result<Vec<(PathBuf, String)>> {
        let folders = ["usr/sbin", "usr/bin", "sbin", "bin"];
        let mut places = folders
            .map(|folder| self.root().join(folder).join(name))
            .into_iter();
        let program = places
            .find(|place| place.is_file())
            .with_context(|| format!("{name} is in no package of arm64"))?;
        let mut files = vec![(program.clone(), format!("/bin/{name}"))];
        let mut known = BTreeSet::new();
        let mut left = needed(&program)?;
        while let Some(library) = left.pop() {
            if !known.insert(library.clone()) {
                continue;
            }
            let mut places = LIBRARIES
                .map(|folder| self.root().join(folder).join(&library))
                .into_iter();
            let place = places
                .find(|place| place.exists())
                .with_context(|| format!("{library}, which {name} loads, is in no package of arm64"))?;
            left.extend(needed(&place)?);
            let inside = if library == LOADER {
                format!("/lib/{library}")
            } else {
                format!("/{}/{library}", LIBRARIES[0])
            };
            files.push((place, inside));
        }
        Ok(files)
    }
}

/// Returns the libraries that a program or a library names.
fn needed(binary: &Path) -> Result<Vec<String>> {
    let listed = output(
        Command::new("readelf")
            .args(["--dynamic", "--wide"])
            .arg(binary)
            .env("LC_ALL", "C"),
    )?;
    Ok(names(&listed).map(str::to_owned).collect())
}

/// Returns the names in readelf's lines ` 0x…01 (NEEDED)  Shared library: [NAME]`.
fn names(readelf: &str) -> impl Iterator<Item = &str> {
    readelf
        .lines()
        .filter(|line| line.contains("(NEEDED)"))
        .filter_map(|line| line.split_once('[')?.1.strip_suffix(']'))
}

/// Returns the versions of this machine's packages. Those that aren't there have none.
fn versions(packages: &[&str]) -> Result<String> {
    let output = Command::new("dpkg-query")
        .args(["-W", "-f", "${Version}\n"])
        .args(packages)
        .output()
        .context("starting dpkg-query: images for arm64 are built on Debian only")?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Removes a folder, if it exists.
fn remove(folder: &Path) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("removing {}", folder.display()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::names;

    #[test]
    fn libraries_are_those_that_readelf_names() {
        let listed = [
            "Dynamic section at offset 0xf9d0 contains 29 entries:",
            "  Tag        Type                         Name/Value",
            " 0x0000000000000001 (NEEDED)             Shared library: [libnftables.so.1]",
            " 0x0000000000000001 (NEEDED)             Shared library: [ld-linux-aarch64.so.1]",
            " 0x000000000000001d (RUNPATH)            Library runpath: [/opt]",
        ]
        .join("\n");
        assert_eq!(
            names(&listed).collect::<Vec<_>>(),
            ["libnftables.so.1", "ld-linux-aarch64.so.1"]
        );
        assert_eq!(names("There is no dynamic section in this file.\n").count(), 0);
    }
}
