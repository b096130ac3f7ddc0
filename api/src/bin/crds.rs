//! Prints the manifests that are generated, as one JSON object: paths within the repository, and texts.

use std::io::Write;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let text = serde_json::to_vec(&thuban_api::manifests()?)?;
    Ok(std::io::stdout().lock().write_all(&text)?)
}
