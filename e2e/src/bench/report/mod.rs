//! What is said at the end: a table, ratios beside their targets, a file of samples, and a plot.

pub mod plot;
pub mod results;
pub mod table;
pub mod targets;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use super::machine::Machine;
use results::Results;

/// Prints the tables and writes `datapath.json`, `datapath.svg` and, if rsvg-convert is there, `datapath.png`.
pub fn write(results: &Results, machine: &Machine, date: &str, runs: usize, folder: &Path) -> Result<()> {
    println!("\n{}", table::text(results));
    println!("{}", targets::text(results));
    fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
    save(folder, "datapath.json", &results.json(machine, date, runs)?)?;
    if let Some(plot) = plot::svg(results) {
        save_picture(&save(folder, "datapath.svg", &plot)?);
    }
    Ok(())
}

/// Writes a file and says where it is.
pub fn save(folder: &Path, name: &str, text: &str) -> Result<PathBuf> {
    let path = folder.join(name);
    fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
    println!("{}", path.display());
    Ok(path)
}

/// Makes a PNG beside the SVG if rsvg-convert is there.
pub fn save_picture(plot: &Path) {
    let picture = plot.with_extension("png");
    let convert = Command::new("rsvg-convert")
        .arg(plot)
        .arg("-o")
        .arg(&picture)
        .status();
    if convert.is_ok_and(|status| status.success()) {
        println!("{}", picture.display());
    }
}
