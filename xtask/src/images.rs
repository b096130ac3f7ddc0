//! Container images as OCI archives in `target/images`, made without a container tool.
//!
//! An archive depends on nothing but the bytes of its files: same files, same digest. An archive that is current is not
//! written again.

use std::{
    fmt::Write as _,
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};
use oci_spec::image::{
    ANNOTATION_REF_NAME, Arch, ConfigBuilder, Descriptor, Digest as BlobDigest, ImageConfigurationBuilder,
    ImageIndexBuilder, ImageManifestBuilder, MediaType, OciLayoutBuilder, Os, RootFsBuilder, SCHEMA_VERSION,
};
use serde::Serialize;
use sha2::{Digest, Sha256};

use crate::platform::Platform;

pub const OPERATOR: &str = "thuban.dev/operator:0.1.0";
pub const LOAD_BALANCERS: &str = "thuban.dev/load-balancers:0.1.0";
pub const OBSERVE: &str = "thuban.dev/observe:0.1.0";
pub const TRANSITD: &str = "thuban.dev/transitd:0.1.0";
pub const PAUSE: &str = "registry.k8s.io/pause:3.10";
pub const AGNHOST: &str = "registry.k8s.io/e2e-test-images/agnhost:2.63.0";

/// The annotation with the name that containerd gives to an image that it imports.
const CONTAINERD_NAME: &str = "io.containerd.image.name";

/// Folders of every image: runtimes mount into them, also with a read-only root.
const FOLDERS: [&str; 12] = [
    "tmp", "etc", "etc/cni", "dev", "host", "opt", "proc", "run", "sys", "var", "var/lib", "var/run",
];

/// An image to be made.
pub struct Image<'a> {
    /// File name in `target/images`.
    pub archive: &'a str,
    /// Repository and tag.
    pub name: &'a str,
    /// Files: where they are, and their absolute path in the image.
    pub files: Vec<(PathBuf, String)>,
    /// Symbolic links: their absolute path in the image, and what they point at.
    pub links: &'a [(&'a str, &'a str)],
    pub entrypoint: &'a [&'a str],
    pub command: &'a [&'a str],
}

impl Image<'_> {
    /// Writes the archive for this machine's platform if one of its files, or this program, is newer; returns its
    /// path.
    pub fn write(&self, folder: &Path) -> Result<PathBuf> {
        self.write_for(Platform::own(), folder)
    }

    /// Like [`Self::write`]. The files must be the platform's.
    pub fn write_for(&self, platform: Platform, folder: &Path) -> Result<PathBuf> {
        fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
        let path = folder.join(self.archive);
        let recipe = std::env::current_exe().context("finding this program")?;
        let sources = self.files.iter().map(|(source, _)| source).chain([&recipe]);
        if sources.into_iter().all(|source| is_newer(&path, source)) {
            return Ok(path);
        }
        let bytes = self.archive_bytes(platform)?;
        // The thread has a folder of its own, because two clusters may be made at once.
        let thread = std::thread::current().id();
        let partial = folder.join(format!(
            "{}.{}-{thread:?}.partial",
            self.archive,
            std::process::id()
        ));
        fs::write(&partial, bytes).with_context(|| format!("writing {}", partial.display()))?;
        fs::rename(&partial, &path).with_context(|| format!("renaming to {}", path.display()))?;
        Ok(path)
    }

    fn archive_bytes(&self, platform: Platform) -> Result<Vec<u8>> {
        let layer = self.layer()?;
        let text = |words: &[&str]| words.iter().map(ToString::to_string).collect::<Vec<_>>();
        let run = ConfigBuilder::default()
            .entrypoint(text(self.entrypoint))
            .cmd(text(self.command))
            .env(text(&["PATH=/bin:/"]))
            .build()?;
        let root = RootFsBuilder::default().diff_ids([digest(&layer)]).build()?;
        let config = ImageConfigurationBuilder::default()
            .architecture(Arch::from(platform.architecture()))
            .os(Os::Linux)
            .config(run)
            .rootfs(root)
            .build()?;
        let config = json(&config)?;
        let manifest = ImageManifestBuilder::default()
            .schema_version(SCHEMA_VERSION)
            .media_type(MediaType::ImageManifest)
            .config(descriptor(MediaType::ImageConfig, &config)?)
            .layers([descriptor(MediaType::ImageLayer, &layer)?])
            .build()?;
        let manifest = json(&manifest)?;
        let tag = self.name.rsplit(':').next().unwrap_or("latest");
        let names = [(CONTAINERD_NAME, self.name), (ANNOTATION_REF_NAME, tag)];
        let names = names.map(|(key, value)| (key.to_owned(), value.to_owned()));
        let mut named = descriptor(MediaType::ImageManifest, &manifest)?;
        named.set_annotations(Some(names.into()));
        let index = ImageIndexBuilder::default()
            .schema_version(SCHEMA_VERSION)
            .manifests([named])
            .build()?;
        let layout = OciLayoutBuilder::default()
            .image_layout_version("1.0.0")
            .build()?;
        let mut archive = tar::Builder::new(Vec::new());
        append(&mut archive, "oci-layout", &json(&layout)?, 0o644)?;
        append(&mut archive, "index.json", &json(&index)?, 0o644)?;
        for blob in [&layer, &config, &manifest] {
            append(&mut archive, &blob_path(&digest(blob)), blob, 0o644)?;
        }
        archive.into_inner().context("closing the archive")
    }

    /// Returns the layer. It has only executables and data, with fixed owner, mode and time.
    fn layer(&self) -> Result<Vec<u8>> {
        let mut layer = tar::Builder::new(Vec::new());
        let mut folders: Vec<String> = FOLDERS.iter().map(ToString::to_string).collect();
        for (_, inside) in &self.files {
            let parents = Path::new(inside.trim_start_matches('/')).ancestors().skip(1);
            folders.extend(parents.filter_map(Path::to_str).map(str::to_owned));
        }
        folders.retain(|folder| !folder.is_empty());
        folders.sort();
        folders.dedup();
        for folder in &folders {
            let mut header = header(if folder == "tmp" { 0o1777 } else { 0o755 }, 0);
            header.set_entry_type(tar::EntryType::Directory);
            layer.append_data(&mut header, folder, std::io::empty())?;
        }
        for (source, inside) in &self.files {
            let bytes = fs::read(source).with_context(|| format!("reading {}", source.display()))?;
            append(&mut layer, inside.trim_start_matches('/'), &bytes, 0o755)?;
        }
        for (inside, target) in self.links {
            let mut header = header(0o777, 0);
            header.set_entry_type(tar::EntryType::Symlink);
            layer.append_link(&mut header, inside.trim_start_matches('/'), target)?;
        }
        layer.into_inner().context("closing the layer")
    }
}

/// Returns a program of this machine as /bin/NAME, and the libraries that it loads.
pub fn with_libraries(program: &Path) -> Result<Vec<(PathBuf, String)>> {
    let name = program.file_name().context("a program's name")?.to_string_lossy();
    let own = (program.to_path_buf(), format!("/bin/{name}"));
    let libraries = libraries(program)?.into_iter();
    let libraries = libraries.map(|path| (PathBuf::from(&path), path));
    Ok(std::iter::once(own).chain(libraries).collect())
}

/// Returns the paths of the libraries that a program loads at its start.
pub fn libraries(program: &Path) -> Result<Vec<String>> {
    if !program.exists() {
        bail!("{}: not there, although its package is", program.display());
    }
    let output = Command::new("ldd")
        .arg(program)
        .output()
        .context("starting ldd")?;
    let listed = String::from_utf8_lossy(&output.stdout);
    Ok(paths(&listed).map(str::to_owned).collect())
}

/// Returns the paths in lines of ldd: `name => /path (0x…)`, or the loader's `/path (0x…)`. A static program has no
/// such line.
fn paths(ldd: &str) -> impl Iterator<Item = &str> {
    ldd.lines()
        .filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')))
}

/// Whether `made` exists and is at least as new as `source`.
pub fn is_newer(made: &Path, source: &Path) -> bool {
    let time = |path: &Path| fs::metadata(path).and_then(|metadata| metadata.modified()).ok();
    matches!((time(made), time(source)), (Some(made), Some(source)) if made >= source)
}

fn header(mode: u32, size: u64) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_mode(mode);
    header.set_size(size);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header
}

fn append<W: Write>(archive: &mut tar::Builder<W>, name: &str, bytes: &[u8], mode: u32) -> Result<()> {
    let mut header = header(mode, bytes.len() as u64);
    archive
        .append_data(&mut header, name, bytes)
        .with_context(|| format!("adding {name}"))
}

/// Returns JSON whose keys are sorted: oci-spec's maps have another order each time.
pub fn json(document: &impl Serialize) -> Result<Vec<u8>> {
    Ok(serde_json::to_vec(&serde_json::to_value(document)?)?)
}

pub fn descriptor(media_type: MediaType, blob: &[u8]) -> Result<Descriptor> {
    let digest: BlobDigest = digest(blob).parse()?;
    Ok(Descriptor::new(media_type, blob.len() as u64, digest))
}

/// Returns the digest as images have it.
pub fn digest(bytes: &[u8]) -> String {
    format!("sha256:{}", hex_digest(bytes))
}

/// Returns the path of a blob in an image layout.
pub fn blob_path(digest: &str) -> String {
    digest.replace("sha256:", "blobs/sha256/")
}

/// Returns the SHA-256 in hexadecimal.
pub fn hex_digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().fold(String::new(), |mut hex, byte| {
        // Writing to a String cannot fail.
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}

/// Makes images for tests.
pub mod testing {
    use super::Image;

    /// Returns an image without files.
    pub fn image() -> Image<'static> {
        Image {
            archive: "a.tar",
            name: "example.test/a:1",
            files: Vec::new(),
            links: &[],
            entrypoint: &["/a"],
            command: &[],
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use serde_json::json;

    use super::{Image, paths, testing::image};
    use crate::platform::Platform;

    #[test]
    fn libraries_are_the_paths_of_ldd() {
        let ldd = "\tlinux-vdso.so.1 (0x00007ffd)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f)\n\t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";
        assert_eq!(
            paths(ldd).collect::<Vec<_>>(),
            ["/lib/x86_64-linux-gnu/libc.so.6", "/lib64/ld-linux-x86-64.so.2"]
        );
        assert_eq!(paths("\tnot a dynamic executable\n").count(), 0);
    }

    #[test]
    fn documents_are_as_the_specification_has_them() {
        let bytes = image().archive_bytes(Platform::Arm64).unwrap();
        let mut archive = tar::Archive::new(&bytes[..]);
        let texts: Vec<String> = archive
            .entries()
            .unwrap()
            .map(|entry| {
                let mut bytes = Vec::new();
                entry.unwrap().read_to_end(&mut bytes).unwrap();
                String::from_utf8_lossy(&bytes).into_owned()
            })
            .collect();
        let [layout, index, layer, config, manifest] = texts.try_into().unwrap();
        let (layer, size) = (super::digest(layer.as_bytes()), layer.len());
        assert_eq!(layout, r#"{"imageLayoutVersion":"1.0.0"}"#);
        let expected = json!({
            "architecture": "arm64",
            "config": {"Cmd": [], "Entrypoint": ["/a"], "Env": ["PATH=/bin:/"]},
            "os": "linux",
            "rootfs": {"diff_ids": [layer], "type": "layers"},
        });
        assert_eq!(config, expected.to_string());
        let of_config = super::digest(config.as_bytes());
        let expected = json!({
            "config": {
                "digest": of_config, "mediaType": "application/vnd.oci.image.config.v1+json", "size": config.len(),
            },
            "layers": [{"digest": layer, "mediaType": "application/vnd.oci.image.layer.v1.tar", "size": size}],
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "schemaVersion": 2,
        });
        assert_eq!(manifest, expected.to_string());
        let expected = json!({
            "manifests": [{
                "annotations": {
                    "io.containerd.image.name": "example.test/a:1",
                    "org.opencontainers.image.ref.name": "1",
                },
                "digest": super::digest(manifest.as_bytes()),
                "mediaType": "application/vnd.oci.image.manifest.v1+json",
                "size": manifest.len(),
            }],
            "schemaVersion": 2,
        });
        assert_eq!(index, expected.to_string());
    }

    #[test]
    fn the_same_files_make_the_same_archive() {
        let file = std::env::current_exe().unwrap();
        let image = Image {
            files: vec![(file, "/opt/deep/a".into())],
            links: &[("/a", "/opt/deep/a")],
            entrypoint: &["/opt/deep/a"],
            ..image()
        };
        let first = image.archive_bytes(Platform::Amd64).unwrap();
        assert!(first == image.archive_bytes(Platform::Amd64).unwrap());
        let mut names = Vec::new();
        let mut archive = tar::Archive::new(&first[..]);
        for entry in archive.entries().unwrap() {
            names.push(entry.unwrap().path().unwrap().display().to_string());
        }
        assert_eq!(names[..2], ["oci-layout", "index.json"]);
        assert_eq!(names.len(), 5);
        let layer = image.layer().unwrap();
        let mut layer = tar::Archive::new(&layer[..]);
        let mut links = layer.entries().unwrap().filter_map(|entry| {
            entry
                .unwrap()
                .link_name()
                .unwrap()
                .map(|target| target.display().to_string())
        });
        assert_eq!(links.next().unwrap(), "/opt/deep/a");
    }
}
