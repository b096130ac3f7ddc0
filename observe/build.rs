//! Makes a placeholder of the page where nobody has built the page: the program embeds the folder `ui/dist`, which npm
//! makes. So cargo needs no npm.

use std::path::Path;
use std::{fs, io};

const PLACEHOLDER: &str = "<!doctype html>
<html lang=\"en\">
<head><meta charset=\"utf-8\"><title>Thuban</title></head>
<body><p>The page is not built: run npm ci and npm run build in observe/ui, then build thuban-observe again.</p></body>
</html>
";

fn main() -> io::Result<()> {
    let folder = Path::new("ui/dist");
    let page = folder.join("index.html");
    if !page.exists() {
        fs::create_dir_all(folder)?;
        fs::write(&page, PLACEHOLDER)?;
    }
    // Cargo looks at a folder's files, too: a page that is built later is embedded.
    println!("cargo::rerun-if-changed=ui/dist");
    Ok(())
}
