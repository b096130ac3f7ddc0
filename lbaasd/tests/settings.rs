//! The program's settings, as a user meets them.

use std::process::Command;

#[test]
fn the_documented_settings_are_in_the_help() {
    let output = Command::new(env!("CARGO_BIN_EXE_lbaasd"))
        .arg("--help")
        .output()
        .unwrap();
    let help = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{help}");
    let page = include_str!("../../docs/load-balancers.md");
    for setting in [
        "THUBAN_DEFAULT_LOAD_BALANCER",
        "THUBAN_LBAASD_METRICS_PORT",
        "THUBAN_L2_SECONDS",
    ] {
        assert!(
            help.contains(setting) && page.contains(setting),
            "{setting}: {help}"
        );
    }
    for port in ["6088", "6089"] {
        assert!(help.contains(port) && page.contains(port), "{port}: {help}");
    }
}
