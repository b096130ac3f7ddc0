//! The demo.

pub fn run() -> anyhow::Result<()> {
    anyhow::bail!("not there yet")
}
