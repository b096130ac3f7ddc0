//! Prints the manifests that are generated, as one JSON object: paths within `install/`, and texts.

use std::collections::BTreeMap;
use std::io::Write;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let manifests = BTreeMap::from(thuban_api::manifests()?);
    let text = serde_json::to_vec(&manifests)?;
    Ok(std::io::stdout().lock().write_all(&text)?)
}
