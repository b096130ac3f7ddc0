//! Every reason that a process writes as a literal is explained: the sources are read for the usual forms.

#![allow(clippy::unwrap_used)] // a test

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use thuban_api::reasons;

const SOURCES: [&str; 2] = ["operator/src", "lbaasd/src"];

/// Collects the code of a folder, without unit tests.
fn collect(folder: &Path, code: &mut Vec<String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(&path, code);
        } else if path.extension().is_some_and(|ending| ending == "rs") && !path.ends_with("tests.rs") {
            let text = fs::read_to_string(&path).unwrap();
            let product = text.split("#[cfg(test)]").next().unwrap_or_default();
            code.push(product.to_owned());
        }
    }
}

/// Adds the literals that are the third argument of calls whose second argument is `flag`, if there is one to have.
fn third_arguments(code: &str, call: &str, flag: Option<&str>, found: &mut BTreeSet<String>) {
    let compact: String = code.split_whitespace().collect();
    for rest in compact.split(call).skip(1) {
        let arguments: Vec<&str> = rest.splitn(4, ',').collect();
        if let [_, second, third, ..] = arguments[..]
            && flag.is_none_or(|flag| second == flag)
            && let Some(literal) = third.trim_start_matches('(').strip_prefix('"')
            && let Some(word) = literal.strip_suffix('"')
            && word.contains(char::is_lowercase)
        {
            found.insert(word.to_owned());
        }
    }
}

/// Adds the literals of functions that are called `reason`.
fn of_functions(code: &str, found: &mut BTreeSet<String>) {
    for rest in code.split("fn reason(").skip(1) {
        let body = rest.split("\n    }\n").next().unwrap_or_default();
        let words = body.split('"').skip(1).step_by(2);
        found.extend(words.map(str::to_owned));
    }
}

#[test]
fn every_reason_that_is_given_is_explained() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut code = Vec::new();
    for folder in SOURCES {
        collect(&root.join(folder), &mut code);
    }
    let mut found = BTreeSet::new();
    for code in &code {
        third_arguments(code, "condition(", Some("false"), &mut found);
        third_arguments(code, ".event(", Some("true"), &mut found);
        third_arguments(code, ".event_about(", Some("true"), &mut found);
        third_arguments(code, "wait(", None, &mut found);
        third_arguments(code, "wait_long(", None, &mut found);
        of_functions(code, &mut found);
    }
    assert!(found.len() > 30, "the sources have other forms now: {found:?}");
    let unexplained: Vec<_> = found
        .iter()
        .filter(|word| reasons::named(word).next().is_none())
        .collect();
    assert!(
        unexplained.is_empty(),
        "api/src/reasons/ does not explain {unexplained:?}: add them, and run `cargo xtask crds`"
    );
}
