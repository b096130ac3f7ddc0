//! The parts of every benchmark's report: the machine and the date, printed tables, a file of numbers, a plot.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

use anyhow::{Context, Result};
use serde::Serialize;

use super::{
    catch_interrupts,
    machine::{self, Machine},
    plot::{self, Picture},
};

/// A measured value, with its name and unit in the file.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Number {
    pub metric: String,
    pub unit: &'static str,
    pub value: f64,
}

impl Number {
    pub fn new(metric: impl Into<String>, unit: &'static str, value: f64) -> Self {
        let metric = metric.into();
        Self { metric, unit, value }
    }
}

/// The promise for a value.
#[derive(Clone, Copy, Debug)]
pub enum Bound {
    AtLeast(f64),
    AtMost(f64),
}

/// Returns the bound, and whether the value keeps it.
pub fn judge(value: f64, bound: Bound) -> String {
    let (is_met, text) = match bound {
        Bound::AtLeast(least) => (value >= least, format!(">= {least}")),
        Bound::AtMost(most) => (value <= most, format!("<= {most}")),
    };
    format!("{text} {}", if is_met { "met" } else { "missed" })
}

/// One run of a benchmark's program.
#[derive(Debug)]
pub struct Session {
    /// Name of its files.
    name: &'static str,
    folder: PathBuf,
    start: Instant,
    machine: Machine,
    date: String,
}

#[derive(Serialize)]
struct File<'a, T> {
    date: &'a str,
    machine: &'a Machine,
    #[serde(flatten)]
    contents: &'a T,
}

impl Session {
    /// Begins a session; from now on Ctrl-C ends the run in order.
    pub fn begin(name: &'static str, folder: &Path) -> Result<Self> {
        catch_interrupts()?;
        Ok(Self {
            name,
            folder: folder.to_owned(),
            start: Instant::now(),
            machine: Machine::observe()?,
            date: machine::date()?,
        })
    }

    /// Returns the seconds since the beginning.
    pub fn seconds(&self) -> f64 {
        self.start.elapsed().as_secs_f64()
    }

    /// Prints the tables, and writes `NAME.json`, `NAME.svg` and, if rsvg-convert is there, `NAME.png`.
    pub fn finish(&self, tables: &str, contents: &impl Serialize, picture: Option<&Picture>) -> Result<()> {
        println!("\n{}", tables.trim_matches('\n'));
        println!();
        let file = File {
            date: &self.date,
            machine: &self.machine,
            contents,
        };
        let json = serde_json::to_string_pretty(&file).context("writing JSON")?;
        fs::create_dir_all(&self.folder).with_context(|| format!("making {}", self.folder.display()))?;
        self.save("json", &json)?;
        if let Some(picture) = picture {
            save_png(&self.save("svg", &plot::svg(picture)?)?);
        }
        println!("took {:.0} s", self.seconds());
        Ok(())
    }

    /// Writes a file and prints its path.
    fn save(&self, ending: &str, text: &str) -> Result<PathBuf> {
        let path = self.folder.join(format!("{}.{ending}", self.name));
        fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
        println!("{}", path.display());
        Ok(path)
    }
}

/// Makes a PNG beside the SVG if rsvg-convert is there.
fn save_png(svg: &Path) {
    let png = svg.with_extension("png");
    let convert = Command::new("rsvg-convert").arg(svg).arg("-o").arg(&png).status();
    if convert.is_ok_and(|status| status.success()) {
        println!("{}", png.display());
    }
}

#[cfg(test)]
mod tests {
    use super::{Bound, judge};

    #[test]
    fn a_target_is_met_at_its_bound_and_missed_beyond() {
        assert_eq!(judge(1.05, Bound::AtLeast(1.05)), ">= 1.05 met");
        assert_eq!(judge(1.04, Bound::AtLeast(1.05)), ">= 1.05 missed");
        assert_eq!(judge(1.1, Bound::AtMost(1.0)), "<= 1 missed");
    }
}
