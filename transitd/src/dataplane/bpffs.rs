//! The folders of pinned maps and links in bpffs.

use std::path::PathBuf;

use clap::Args;
use thuban_common::tables::LAYOUT_VERSION;

/// Where the pinned maps and links are.
#[derive(Args, Clone, Debug)]
pub struct PinSettings {
    /// Mount point of this node's bpffs, which holds maps and links.
    #[arg(long, env = "THUBAN_BPFFS", default_value = "/sys/fs/bpf", global = true)]
    pub bpffs: PathBuf,
    /// Version of the layout of maps that the programs were built for. Tests of upgrades change it.
    #[arg(long, env = "THUBAN_LAYOUT", default_value_t = LAYOUT_VERSION, hide = true, global = true)]
    pub layout: u32,
}

impl PinSettings {
    /// Returns the directory of this layout's maps and links.
    pub fn layout(&self) -> PathBuf {
        self.bpffs.join("thuban").join(format!("layout_{}", self.layout))
    }
    pub fn maps(&self) -> PathBuf {
        self.layout().join("maps")
    }
    pub fn links(&self) -> PathBuf {
        self.layout().join("links")
    }
    /// Directories of the layouts of other versions that ran on this node, sorted.
    pub fn other_layouts(&self) -> std::io::Result<Vec<PathBuf>> {
        let own = self.layout();
        let entries = match std::fs::read_dir(self.bpffs.join("thuban")) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut others = Vec::new();
        for entry in entries {
            let path = entry?.path();
            let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
            if path != own && name.is_some_and(|name| name.starts_with("layout_")) {
                others.push(path);
            }
        }
        others.sort();
        Ok(others)
    }
}
