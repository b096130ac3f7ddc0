//! Programs of others that are built from their Go modules: a folder of the repository whose go.mod names them as
//! tools.
//!
//! They are built once, and kept in the user's cache under the digest of that folder's files. A folder in the cache is
//! complete: it is filled under another name and then renamed.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};

use crate::{
    build::{root, run_command},
    kube,
    platform::Platform,
};

pub struct GoTools {
    /// Name of the folder in the cache, before the digest.
    pub name: &'static str,
    /// Folder of the go.mod.
    pub modules: &'static str,
    /// Files of which the digest is made, besides the flags.
    pub files: &'static [&'static str],
    /// Build tags, with commas between them.
    pub tags: &'static str,
    /// Whether it needs a C compiler; all other tools are static programs without C.
    pub needs_c: bool,
    /// Flags of the linker, such as the program's version.
    pub flags: &'static str,
    /// Arguments of `go install`: packages, or `tool` for all that the go.mod lists.
    pub packages: &'static [&'static str],
    /// Packages whose tests are built as a program, each after the program's name.
    pub tests: &'static [(&'static str, &'static str)],
    pub binaries: &'static [&'static str],
}

impl GoTools {
    /// Returns the folder with the binaries; takes no time when they exist.
    pub fn ensure(&self) -> Result<PathBuf> {
        self.ensure_for(Platform::own())
    }

    /// Like [`Self::ensure`], for any platform, if the tools need no C.
    pub fn ensure_for(&self, platform: Platform) -> Result<PathBuf> {
        let modules = root().join(self.modules);
        let mut digest = Sha256::new();
        for file in self.files {
            let path = modules.join(file);
            digest.update(fs::read(&path).with_context(|| format!("reading {}", path.display()))?);
        }
        digest.update(self.flags);
        let digest = format!("{:x}", digest.finalize());
        let name = if platform == Platform::own() {
            self.name.to_owned()
        } else {
            format!("{}-{}", self.name, platform.architecture())
        };
        let folder = kube::cache()?.join(format!("{name}-{}", &digest[..12]));
        if !self.is_complete(&folder) {
            self.build(&modules, &folder, platform)?;
        }
        Ok(folder)
    }

    /// Returns the folder of a module's sources, which [`Self::ensure`] has downloaded.
    pub fn folder_of(&self, module: &str) -> Result<PathBuf> {
        let mut go = kube::go();
        go.current_dir(root().join(self.modules))
            .args(["list", "-m", "-f", "{{.Dir}}", module]);
        let output = go.output().context("starting go")?;
        let folder = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        if !output.status.success() || folder.is_empty() {
            bail!(
                "no sources of {module}: {}",
                String::from_utf8_lossy(&output.stderr).trim()
            );
        }
        Ok(folder.into())
    }

    fn is_complete(&self, folder: &Path) -> bool {
        self.binaries.iter().all(|name| folder.join(name).exists())
    }

    fn build(&self, modules: &Path, folder: &Path, platform: Platform) -> Result<()> {
        let go = Command::new("go").arg("version").stdout(Stdio::null()).status();
        if go.is_err() {
            bail!(
                "no Go: install version {} or newer (https://go.dev/dl) to build {}",
                kube::OLDEST_GO,
                self.binaries.join(", ")
            );
        }
        let partial = folder.with_extension(format!("partial-{}", std::process::id()));
        fs::create_dir_all(&partial).with_context(|| format!("making {}", partial.display()))?;
        let result = self.fill(modules, &partial, platform).and_then(|()| {
            if !self.is_complete(&partial) {
                bail!("go left out some of {}", self.binaries.join(", "));
            }
            let _ = fs::remove_dir_all(folder);
            fs::rename(&partial, folder).with_context(|| format!("renaming to {}", folder.display()))
        });
        if result.is_err() {
            let _ = fs::remove_dir_all(&partial);
        }
        result
    }

    fn fill(&self, modules: &Path, partial: &Path, platform: Platform) -> Result<()> {
        let go = |verb: &[&str]| {
            let mut go = kube::go();
            go.current_dir(modules).args(verb).args([
                "-tags",
                self.tags,
                "-ldflags",
                &format!("-s -w {}", self.flags),
            ]);
            if self.needs_c {
                go.env("CGO_ENABLED", "1");
            }
            if platform != Platform::own() {
                go.env("GOARCH", platform.architecture());
            }
            go
        };
        if !self.packages.is_empty() {
            // `go install` puts no programs of another platform into GOBIN.
            let mut make = if platform == Platform::own() {
                let mut install = go(&["install"]);
                install.env("GOBIN", partial);
                install
            } else {
                let mut build = go(&["build"]);
                build.arg("-o").arg(partial);
                build
            };
            run_command(make.args(self.packages))?;
        }
        for (name, package) in self.tests {
            run_command(go(&["test", "-c"]).arg("-o").arg(partial.join(name)).arg(package))?;
        }
        Ok(())
    }
}
