//! The plugin as a process, without a cluster: words, exit statuses, and what it says when it can't look.

#![allow(clippy::unwrap_used)] // a test

use std::process::{Command, Output};

const VERBS: [&str; 16] = [
    "status",
    "check",
    "tree",
    "endpoints",
    "why",
    "trace",
    "flows",
    "top",
    "ui",
    "sysdump",
    "values",
    "uninstall",
    "connectivity",
    "explain",
    "version",
    "completions",
];

fn run(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kubectl-thuban"))
        .args(arguments)
        .env_remove("KUBECONFIG")
        .env_remove("THUBAN_NAMESPACE")
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn every_verb_has_help_with_examples() {
    let output = run(&["--help"]);
    let help = text(&output.stdout);
    assert!(
        help.contains("kubectl thuban") && help.contains("Exit status:"),
        "{help}"
    );
    assert!(help.starts_with("Says how Thuban stands"), "{help}");
    for verb in VERBS {
        assert!(help.contains(&format!("  {verb}")), "{verb}: {help}");
        let output = run(&[verb, "--help"]);
        let help = text(&output.stdout);
        assert!(output.status.success(), "{verb}");
        assert!(
            help.contains("Examples:") && help.contains("--context"),
            "{verb}: {help}"
        );
    }
}

#[test]
fn a_reason_is_explained_without_a_cluster() {
    let output = run(&["explain", "networkfull"]);
    assert_eq!(output.status.code(), Some(0));
    let said = text(&output.stdout);
    assert!(
        said.contains("NetworkFull") && said.contains("append a range"),
        "{said}"
    );
    assert!(!said.contains('\x1b'), "colour, and this is no terminal: {said}");
    let output = run(&["explain", "outside_vpc", "-o", "json"]);
    let said: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(said[0]["of"], "drop");
    let output = run(&["explain", "NetworkFul"]);
    assert_eq!(output.status.code(), Some(2));
    let said = text(&output.stderr);
    assert!(
        said.contains("did you mean") && said.contains("NetworkFull"),
        "{said}"
    );
}

#[test]
fn no_cluster_means_that_it_could_not_look() {
    for line in [
        "status",
        "check",
        "tree",
        "endpoints",
        "version",
        "why a b",
        "trace a",
        "flows",
        "top",
        "ui",
        "values",
        "sysdump",
        "connectivity test",
    ] {
        let words: Vec<&str> = line.split(' ').collect();
        let output = run(&[&words[..], &["--kubeconfig", "/nonexistent/kubeconfig"]].concat());
        assert_eq!(output.status.code(), Some(2), "{line}");
        let said = text(&output.stderr);
        assert!(said.starts_with("error: kubeconfig: "), "{line}: {said}");
        assert!(output.stdout.is_empty(), "{line}");
    }
}

#[test]
fn a_wrong_command_line_is_refused() {
    for line in [
        &["statuss"][..],
        &["endpoints", "-o", "xml"],
        &["explain"],
        &["why", "a"],
        &["trace"],
        &["trace", "a", "--count", "0"],
        &["flows", "--verdict", "lost"],
        &["flows", "--last", "10001"],
        &["flows", "-A", "-n", "red"],
        &["top", "nodes"],
        &["top", "--watch=0"],
        &["ui", "--port", "65536"],
        &["connectivity", "tset"],
        &["connectivity", "test", "--namespace-prefix", "Net"],
        &["connectivity", "test", "--cidr", "10.0.0.1/16"],
    ] {
        let output = run(line);
        assert_eq!(output.status.code(), Some(2), "{line:?}");
        assert!(text(&output.stderr).contains("error:"), "{line:?}");
    }
}

#[test]
fn nothing_is_removed_where_nobody_can_be_asked() {
    // Standard input is no terminal.
    let output = Command::new(env!("CARGO_BIN_EXE_kubectl-thuban"))
        .args(["uninstall", "--kubectl", "/nonexistent/kubectl"])
        .stdin(std::process::Stdio::null())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    let said = text(&output.stderr);
    assert!(said.contains("--yes"), "{said}");
    let output = run(&["uninstall", "--node-script"]);
    assert_eq!(output.status.code(), Some(0));
    assert!(output.stdout.starts_with(b"#!/bin/sh\n"));
}

#[test]
fn shells_get_a_script() {
    for shell in ["bash", "zsh", "fish"] {
        let output = run(&["completions", shell]);
        assert!(output.status.success(), "{shell}");
        let script = text(&output.stdout);
        assert!(
            script.contains("kubectl-thuban") && script.contains("endpoints"),
            "{shell}: {script}"
        );
    }
}

#[test]
fn each_verb_has_a_manual_page() {
    let folder = std::env::temp_dir().join(format!("thuban-man-{}", std::process::id()));
    std::fs::create_dir(&folder).unwrap();
    let output = run(&["man", "--dir", folder.to_str().unwrap()]);
    let page = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap_or_default();
    let pages: Vec<String> = VERBS.map(|verb| page(&format!("kubectl-thuban-{verb}.1"))).into();
    let main = page("kubectl-thuban.1");
    std::fs::remove_dir_all(&folder).unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(main.contains("Says how Thuban stands"), "{main}");
    for (verb, page) in VERBS.iter().zip(pages) {
        assert!(page.contains("Examples:"), "{verb}: {page}");
    }
    let output = run(&["man", "--dir", "/nonexistent/folder"]);
    assert_eq!(output.status.code(), Some(2));
}
