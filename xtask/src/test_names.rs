//! Checks that names of tests fit on a screen, in a list and in a table of a page.

use anyhow::{Result, bail};

use crate::links;

const LONGEST_NAME: usize = 60;

/// Prints all names that are too long.
pub fn run() -> Result<()> {
    let mut count = 0;
    for (path, text) in links::tree()? {
        for name in long_names(&text) {
            eprintln!(
                "{path}: {name} has {} characters, at most {LONGEST_NAME}",
                name.len()
            );
            count += 1;
        }
    }
    if count > 0 {
        bail!("{count} names of tests are too long");
    }
    Ok(())
}

fn long_names(text: &str) -> Vec<&str> {
    let mut is_test = false;
    let mut long = Vec::new();
    for line in text.lines().map(str::trim_start) {
        if line.starts_with("#[test]") || line.starts_with("#[tokio::test") {
            is_test = true;
        }
        let line = line.strip_prefix("async ").unwrap_or(line);
        let name = line.strip_prefix("fn ").and_then(|rest| rest.split('(').next());
        if let Some(name) = name
            && std::mem::take(&mut is_test)
            && name.len() > LONGEST_NAME
        {
            long.push(name);
        }
    }
    long
}

#[cfg(test)]
mod tests {
    use super::{LONGEST_NAME, long_names};

    #[test]
    fn only_names_of_tests_are_bounded() {
        let (long, most) = ("a".repeat(LONGEST_NAME + 1), "b".repeat(LONGEST_NAME));
        let text = format!(
            "fn {long}_helper() {{}}\n    #[test]\n    #[should_panic]\n    fn {long}() {{}}\n#[tokio::test(start_paused = true)]\n\
             async fn {long}_later() {{}}\n#[test]\nfn {most}() {{}}\nfn {long}_other() {{}}"
        );
        assert_eq!(long_names(&text), [long.clone(), format!("{long}_later")]);
    }
}
