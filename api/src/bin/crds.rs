//! Prints the CRDs as one YAML stream: `install/10-crds.yaml`.

use std::io::Write;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    std::io::stdout()
        .lock()
        .write_all(thuban_api::manifest()?.as_bytes())?;
    Ok(())
}
