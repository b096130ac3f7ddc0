//! Builds everything that a cluster runs: the eBPF object, static release binaries, and the images with them.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

use anyhow::{Context, Result, bail};

use crate::{
    deps, ebpf,
    images::{self, Image, is_newer},
    kube,
};

const TARGET: &str = "x86_64-unknown-linux-gnu";

/// The workspace's root.
pub fn root() -> PathBuf {
    let xtask = Path::new(env!("CARGO_MANIFEST_DIR"));
    xtask.parent().unwrap_or(xtask).to_path_buf()
}

/// Folder of the image archives.
pub fn images_folder() -> PathBuf {
    root().join("target/images")
}

/// Builds what is out of date.
pub fn run() -> Result<()> {
    deps::ensure()?;
    let object = step("eBPF programs", ebpf::build)?;
    step("release binaries (operator, transitd, CNI plugin)", binaries)?;
    let tools = step("kube binaries", kube::binaries)?;
    step("images", || make_images(&object, &tools))
}

/// Says what is done and, when it took a while, how long.
pub fn step<T>(name: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    println!("==> {name}");
    let start = Instant::now();
    let made = work().with_context(|| name.to_owned())?;
    println!("    {name}: {:.1} s", start.elapsed().as_secs_f32());
    Ok(made)
}

fn binaries() -> Result<()> {
    release(&[])
}

/// Builds what images have; with `more`, of these only what it names, and the like.
fn release(more: &[&str]) -> Result<()> {
    run_command(
        Command::new("cargo")
            .current_dir(root())
            .args(["build", "--release", "--target", TARGET])
            .args(["-p", "thuban-operator", "-p", "transitd", "-p", "thuban-cni"])
            .args(more)
            .env(
                "CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUSTFLAGS",
                "-C target-feature=+crt-static",
            ),
    )
}

/// Builds the operator and its benchmark, with the dependencies of the images' binaries; answers their folder.
pub fn scale() -> Result<PathBuf> {
    release(&[
        "-p",
        "thuban-e2e",
        "--bin",
        "thuban-operator",
        "--bin",
        "scale-bench",
    ])?;
    Ok(release_folder())
}

/// Builds the benchmark of Services, with the dependencies of the images' binaries.
pub fn services() -> Result<PathBuf> {
    release(&["-p", "thuban-e2e", "--bin", "services-bench"])?;
    Ok(release_folder().join("services-bench"))
}

/// What the benchmark of CNI runs: binaries as images have them, and itself.
pub struct CniParts {
    pub transitd: PathBuf,
    pub plugin: PathBuf,
    pub benchmark: PathBuf,
}

pub fn cni() -> Result<CniParts> {
    release(&[
        "-p",
        "thuban-e2e",
        "--bin",
        "transitd",
        "--bin",
        "thuban",
        "--bin",
        "cni-bench",
    ])?;
    let work = images_files()?;
    let release = release_folder();
    Ok(CniParts {
        transitd: stripped(&release.join("transitd"), &work.join("transitd"), "--strip-debug")?,
        plugin: plugin(&release, &work)?,
        benchmark: release.join("cni-bench"),
    })
}

fn release_folder() -> PathBuf {
    root().join("target").join(TARGET).join("release")
}

/// Folder of what goes into images.
fn images_files() -> Result<PathBuf> {
    let work = images_folder().join("files");
    fs::create_dir_all(&work).with_context(|| format!("making {}", work.display()))?;
    Ok(work)
}

/// Started for every pod and every few seconds for STATUS: as small as it gets.
fn plugin(release: &Path, work: &Path) -> Result<PathBuf> {
    stripped(&release.join("thuban"), &work.join("thuban"), "--strip-all").and_then(limited)
}

fn make_images(object: &Path, tools: &Path) -> Result<()> {
    let work = images_files()?;
    let release = release_folder();
    let [operator, transitd] = ["thuban-operator", "transitd"]
        .map(|name| stripped(&release.join(name), &work.join(name), "--strip-debug"));
    let plugin = plugin(&release, &work);
    let pause = compile_pause(&work.join("pause"))?;
    let mut daemon = vec![
        (transitd?, "/bin/transitd".into()),
        (plugin?, "/opt/thuban/thuban".into()),
        (object.to_path_buf(), "/usr/lib/thuban/thuban-programs.o".into()),
    ];
    daemon.extend(images::with_libraries(&deps::program("nft")?)?);
    let list = [
        Image {
            archive: "operator.tar",
            name: images::OPERATOR,
            files: vec![(operator?, "/bin/thuban-operator".into())],
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
        let path = image.write(&images_folder())?;
        let size = fs::metadata(&path)
            .with_context(|| format!("reading {}", path.display()))?
            .len();
        println!("  {} ({} KiB): {}", image.name, size / 1024, path.display());
    }
    Ok(())
}

/// The CNI plugin, if it is as small as it must be.
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

/// A copy without debug information, or without any symbols.
fn stripped(source: &Path, copy: &Path, how: &str) -> Result<PathBuf> {
    if !is_newer(copy, source) {
        run_command(Command::new("strip").arg(how).arg("-o").arg(copy).arg(source))?;
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

/// Runs it with this process's output; an error names the command.
pub fn run_command(command: &mut Command) -> Result<()> {
    let status = command
        .status()
        .with_context(|| format!("starting {command:?}"))?;
    if !status.success() {
        bail!("{command:?}: {status}");
    }
    Ok(())
}
