//! The program's settings, as a user meets them.

use std::process::Command;

#[test]
fn the_documented_settings_are_in_the_help() {
    let program = env!("CARGO_BIN_EXE_thuban-speaker");
    let output = Command::new(program).args(["run", "--help"]).output().unwrap();
    let help = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{help}");
    let page = include_str!("../../docs/load-balancers/operations.md");
    for setting in ["THUBAN_SPEAKER_METRICS_PORT", "6090"] {
        assert!(
            help.contains(setting) && page.contains(setting),
            "{setting}: {help}"
        );
    }
    let alive = Command::new(program)
        .args(["alive", "--gobgpd-socket", "/nonexistent"])
        .output()
        .unwrap();
    assert!(!alive.status.success(), "nothing answers there");
}
