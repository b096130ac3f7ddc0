//! Builds everything that a cluster runs: the eBPF object, static binaries, and the images with them.
//!
//! All cargo builds are for an explicit target and static (`.cargo/config.toml`), so that images, tests and tools share
//! their dependencies.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

use anyhow::{Context, Result, bail};

use crate::{
    cross, deps, ebpf,
    images::{self, Image, is_newer},
    kube,
    platform::Platform,
};

/// Packages whose binaries go into images.
pub const PACKAGES: [&str; 4] = ["thuban-operator", "transitd", "thuban-cni", "thuban-connectivity"];

/// The name of the demo's cluster.
pub const DEMO: &str = "demo";

/// The kind of binaries that an image has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profile {
    /// The binaries that users run.
    Release,
    /// Those of the demo, compiled with less optimisation: in half the time, and tests use their dependencies.
    Demo,
    /// The binaries that `cargo xtask test` has built anyway: with assertions, overflow checks and failpoints.
    Test,
}

impl Profile {
    /// Returns the profile of a local cluster: the tests' clusters run what the tests were built with.
    pub fn of(cluster: &str) -> Self {
        if is_tests(cluster) {
            Self::Test
        } else if cluster == DEMO {
            Self::Demo
        } else {
            Self::Release
        }
    }

    /// Folder of cargo's binaries.
    pub fn binaries(self) -> Result<PathBuf> {
        Ok(target()?.join(match self {
            Self::Release => "release",
            Self::Demo | Self::Test => "debug",
        }))
    }

    /// Folder of the image archives.
    pub fn images(self) -> PathBuf {
        root().join(match self {
            Self::Release => "target/images",
            Self::Demo => "target/demo-images",
            Self::Test => "target/test-images",
        })
    }

    /// Folder of a platform's image archives.
    pub fn images_for(self, platform: Platform) -> PathBuf {
        if platform == Platform::own() {
            self.images()
        } else {
            self.images().join(platform.architecture())
        }
    }
}

/// Whether the tests bring up a cluster of that name.
pub fn is_tests(cluster: &str) -> bool {
    cluster.starts_with("test")
}

/// Cargo's folder for the target that everything is built for. The binary of this program is in it, too.
pub fn target() -> Result<PathBuf> {
    let program = std::env::current_exe().context("finding this program")?;
    let folder = program
        .ancestors()
        .nth(2)
        .context("the folder of this program's profile")?;
    Ok(folder.to_path_buf())
}

/// The workspace's root.
pub fn root() -> PathBuf {
    let xtask = Path::new(env!("CARGO_MANIFEST_DIR"));
    xtask.parent().unwrap_or(xtask).to_path_buf()
}

/// Builds what is out of date, as users run it.
pub fn run() -> Result<()> {
    deps::ensure()?;
    step(
        "release binaries (operator, transitd, CNI plugin, connectivity)",
        || release(&[]),
    )?;
    images(Profile::Release)
}

/// Builds what the demo's cluster runs. Go builds Kubernetes beside Rust: neither keeps both cores busy all the time.
pub fn demo() -> Result<()> {
    deps::ensure()?;
    std::thread::scope(|scope| {
        let tools = scope.spawn(kube::binaries);
        let built = step("binaries (operator, transitd, CNI plugin, connectivity)", || {
            compile(Profile::Demo, &PACKAGES, &[])
        });
        let object = step("eBPF programs", ebpf::build);
        let tools = step("kube binaries", || {
            tools
                .join()
                .map_err(|_| anyhow::anyhow!("the build of Kubernetes panicked"))?
        });
        built?;
        let (object, tools) = (object?, tools?);
        step("images", || make_images(Profile::Demo, &object, &tools))
    })
}

/// Makes the images; the profile's binaries must have been built.
pub fn images(profile: Profile) -> Result<()> {
    let object = step("eBPF programs", ebpf::build)?;
    let tools = step("kube binaries", kube::binaries)?;
    step("images", || make_images(profile, &object, &tools))
}

/// Returns cargo as it runs when a person calls it by hand. The variables that `cargo run` gives to this program would
/// make cargo rebuild the dependencies whose build scripts look at them.
pub fn cargo() -> Command {
    cargo_at("cargo")
}

/// Like [`cargo`], of another compiler.
pub fn cargo_at(program: &str) -> Command {
    let mut cargo = Command::new(program);
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            cargo.env_remove(&name);
        }
    }
    cargo
}

/// Says what is done and, when it took a while, how long.
pub fn step<T>(name: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    println!("==> {name}");
    let start = Instant::now();
    let made = work().with_context(|| name.to_owned())?;
    println!("    {name}: {:.1} s", start.elapsed().as_secs_f32());
    Ok(made)
}

/// Builds the binaries of the images. `more` names the only ones to build, and further arguments of cargo.
fn release(more: &[&str]) -> Result<()> {
    compile(Profile::Release, &PACKAGES, more)
}

/// Builds the binaries of these packages for a profile. The tests' have been built. `more`: arguments of cargo.
pub fn compile(profile: Profile, packages: &[&str], more: &[&str]) -> Result<()> {
    let optimised: &[&str] = match profile {
        Profile::Release => &["--release"],
        Profile::Demo => &[],
        Profile::Test => return Ok(()),
    };
    run_command(
        cargo()
            .current_dir(root())
            .arg("build")
            .args(optimised)
            .args(packages.iter().flat_map(|package| ["-p", package]))
            .args(more),
    )
}

/// Builds the operator and its benchmark, with the dependencies of the images' binaries; returns their folder.
pub fn scale() -> Result<PathBuf> {
    release(&[
        "-p",
        "thuban-e2e",
        "--bin",
        "thuban-operator",
        "--bin",
        "scale-bench",
    ])?;
    Profile::Release.binaries()
}

/// Builds a benchmark that runs on clusters, with the dependencies of the images' binaries; returns its path.
pub fn bench_of_clusters(name: &str) -> Result<PathBuf> {
    release(&["-p", "thuban-e2e", "--bin", name])?;
    Ok(Profile::Release.binaries()?.join(name))
}

/// The binaries that the benchmark of CNI runs: those of the images, and the benchmark itself.
pub struct NodeParts {
    pub transitd: PathBuf,
    pub plugin: PathBuf,
    pub benchmark: PathBuf,
}

/// Builds a benchmark that runs a node's daemon and plugin, by the name of its binary.
pub fn with_node(benchmark: &str) -> Result<NodeParts> {
    release(&[
        "-p",
        "thuban-e2e",
        "--bin",
        "transitd",
        "--bin",
        "thuban",
        "--bin",
        benchmark,
    ])?;
    let work = images_files(Profile::Release)?;
    let release = Profile::Release.binaries()?;
    Ok(NodeParts {
        transitd: stripped(&release.join("transitd"), &work.join("transitd"), "--strip-debug")?,
        plugin: plugin(&release, &work).and_then(limited)?,
        benchmark: release.join(benchmark),
    })
}

/// Builds a benchmark that needs only the programs; returns its path.
pub fn bench_of_packets(name: &str) -> Result<PathBuf> {
    run_command(cargo().current_dir(root()).args([
        "build",
        "--release",
        "--quiet",
        "-p",
        "thuban-e2e",
        "--bin",
        name,
    ]))?;
    Ok(Profile::Release.binaries()?.join(name))
}

/// Builds the files that go into images; returns their folder.
pub fn images_files(profile: Profile) -> Result<PathBuf> {
    let work = profile.images().join("files");
    fs::create_dir_all(&work).with_context(|| format!("making {}", work.display()))?;
    Ok(work)
}

/// Builds the plugin as small as possible: it is started for every pod, and every few seconds for STATUS.
fn plugin(release: &Path, work: &Path) -> Result<PathBuf> {
    stripped(&release.join("thuban"), &work.join("thuban"), "--strip-all")
}

fn make_images(profile: Profile, object: &Path, tools: &Path) -> Result<()> {
    let work = images_files(profile)?;
    let binaries = profile.binaries()?;
    let [operator, transitd, connectivity] = ["thuban-operator", "transitd", "thuban-connectivity"]
        .map(|name| stripped(&binaries.join(name), &work.join(name), "--strip-debug"));
    let mut plugin = plugin(&binaries, &work);
    if profile == Profile::Release {
        plugin = plugin.and_then(limited);
    }
    let pause = compile_pause(&work.join("pause"))?;
    let nft = images::with_libraries(&deps::program("nft")?)?;
    let [operator, transitd] = own_images(operator?, transitd?, plugin?, connectivity?, object, nft);
    let list = [
        operator,
        transitd,
        Image {
            archive: "pause.tar",
            name: images::PAUSE,
            files: vec![(pause, "/pause".into())],
            links: &[],
            entrypoint: &["/pause"],
            command: &[],
        },
        Image {
            archive: "agnhost.tar",
            name: images::AGNHOST,
            files: vec![(tools.join("agnhost"), "/agnhost".into())],
            links: &[],
            entrypoint: &["/agnhost"],
            command: &["pause"],
        },
    ];
    for image in &list {
        let path = image.write(&profile.images())?;
        let size = fs::metadata(&path)
            .with_context(|| format!("reading {}", path.display()))?
            .len();
        println!("  {} ({} KiB): {}", image.name, size / 1024, path.display());
    }
    Ok(())
}

/// Returns the images of the operator and of transitd. `nft`: the program and its libraries, with their paths inside.
pub fn own_images(
    operator: PathBuf,
    transitd: PathBuf,
    plugin: PathBuf,
    connectivity: PathBuf,
    object: &Path,
    nft: Vec<(PathBuf, String)>,
) -> [Image<'static>; 2] {
    let mut daemon = vec![
        (transitd, "/bin/transitd".into()),
        (plugin, "/opt/thuban/thuban".into()),
        // Every node has this image: the pods of `kubectl thuban connectivity test` need no other.
        (connectivity, "/bin/thuban-connectivity".into()),
        (object.to_path_buf(), "/usr/lib/thuban/thuban-programs.o".into()),
    ];
    daemon.extend(nft);
    [
        Image {
            archive: "operator.tar",
            name: images::OPERATOR,
            files: vec![(operator, "/bin/thuban-operator".into())],
            links: &[],
            entrypoint: &["/bin/thuban-operator"],
            command: &[],
        },
        Image {
            archive: "transitd.tar",
            name: images::TRANSITD,
            files: daemon,
            links: &[],
            entrypoint: &["/bin/transitd"],
            command: &["run"],
        },
    ]
}

/// Returns the CNI plugin, if it is as small as it must be.
fn limited(plugin: PathBuf) -> Result<PathBuf> {
    const LARGEST: u64 = 4 << 20;
    let size = fs::metadata(&plugin)
        .with_context(|| format!("reading {}", plugin.display()))?
        .len();
    if size > LARGEST {
        bail!("{} has {size} bytes, more than {LARGEST}", plugin.display());
    }
    Ok(plugin)
}

/// Returns a copy of a binary without debug information (`--strip-debug`) or any symbols (`--strip-all`).
pub fn stripped(source: &Path, copy: &Path, how: &str) -> Result<PathBuf> {
    stripped_for(Platform::own(), source, copy, how)
}

/// Like [`stripped`], for any platform.
pub fn stripped_for(platform: Platform, source: &Path, copy: &Path, how: &str) -> Result<PathBuf> {
    if !is_newer(copy, source) {
        let strip = if platform == Platform::own() {
            "strip"
        } else {
            cross::STRIP
        };
        run_command(Command::new(strip).arg(how).arg("-o").arg(copy).arg(source))?;
    }
    Ok(copy.to_path_buf())
}

fn compile_pause(binary: &Path) -> Result<PathBuf> {
    let source = root().join("e2e/images/pause.c");
    if !is_newer(binary, &source) {
        run_command(
            Command::new("cc")
                .args(["-static", "-Os", "-s", "-Wall", "-Werror", "-o"])
                .arg(binary)
                .arg(&source),
        )?;
    }
    Ok(binary.to_path_buf())
}

/// Runs a command with this process's output; an error names the command.
pub fn run_command(command: &mut Command) -> Result<()> {
    let status = command
        .status()
        .with_context(|| format!("starting {command:?}"))?;
    if !status.success() {
        bail!("{command:?}: {status}");
    }
    Ok(())
}
