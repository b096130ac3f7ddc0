//! `cargo xtask test --kernel`: the tests of the programs on Debian's kernel 6.12 too, in a virtual machine without a
//! disk, and the instructions that the verifier looked at on both kernels.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader},
    path::Path,
    process::{Child, Command, ExitCode, Stdio},
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};

use super::{
    PROGRAMS,
    binaries::{self, Binary},
    debian_kernel::Kernel,
    machine::{self, Machine},
    output::{Sum, result_of},
};
use crate::{build::step, ebpf};

/// Modules that the tests need, in the order in which they are loaded.
const MODULES: [&str; 1] = ["drivers/net/veth.ko.xz"];
/// The test that prints the verifier's counts, and the end of its lines.
const COUNTING: &str = "every_program_passes_the_verifier_with_room_to_spare";
const COUNTED: &str = " instructions verified";
/// The last line of the machine's output.
const END: &str = "thuban: the tests have ended";
/// How long the machine may take.
const TIME_LIMIT: Duration = Duration::from_mins(30);
/// Random frames that are compared with the model: a twentieth of those of this machine's own tests.
const FRAMES: u32 = 5000;
const MEMORY_MIB: &str = "3072";

/// The instructions of each program that the verifier looked at.
type Counts = BTreeMap<String, u64>;

/// The result of a virtual machine.
#[derive(Debug, Default)]
struct Outcome {
    release: String,
    counts: Counts,
    sum: Sum,
    has_ended: bool,
}

/// Runs the tests of the programs in a virtual machine, and prints the counts of both kernels.
pub fn run() -> Result<ExitCode> {
    machine::ensure("load eBPF programs")?;
    let object = step("eBPF programs", ebpf::build)?;
    let built = step("tests", binaries::build)?;
    let mut binaries = built.binaries.iter();
    let tests = binaries.find(|binary| binary.is_test(PROGRAMS));
    let tests = tests.context("no tests of the programs were built")?;
    let machine = Machine {
        name: PROGRAMS,
        programs: &["ip"],
        modules: &MODULES,
        script: script(),
    };
    let (kernel, archive) = machine.prepare(tests, &object)?;
    let here = step("counts of this kernel", || counts_here(tests))?;
    let start = Instant::now();
    let there = step("virtual machine", || boot(&kernel, &archive))?;
    print_counts(&here, &there);
    let Sum { passed, failed, .. } = there.sum;
    let seconds = start.elapsed().as_secs();
    println!(
        "\non {}, after {seconds} s:\n{passed} passed, {failed} failed",
        there.release
    );
    Ok(if failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Returns the lines that run the tests.
fn script() -> String {
    format!(
        "export THUBAN_DIFFERENTIAL={FRAMES}\n\
         echo kernel $($box uname -r)\n\
         {PROGRAMS} --exact {COUNTING} --nocapture\n\
         {PROGRAMS} --skip {COUNTING}\n\
         echo {END}\n"
    )
}

/// Returns the counts of this machine's kernel.
fn counts_here(tests: &Binary) -> Result<Counts> {
    let output = Command::new(&tests.executable)
        .args(["--exact", COUNTING, "--nocapture"])
        .output()
        .with_context(|| format!("starting {}", tests.executable.display()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(
        output.status.success(),
        "{COUNTING}: {text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(text.lines().filter_map(count_of).collect())
}

/// Reads a line such as `agent_tc: 1234 instructions verified`.
fn count_of(line: &str) -> Option<(String, u64)> {
    let (name, count) = line.strip_suffix(COUNTED)?.rsplit_once(": ")?;
    // The first line begins with the test's name.
    let name = name.rsplit(' ').next()?;
    Some((name.to_owned(), count.parse().ok()?))
}

/// Runs the machine until it ends, and prints what it prints. Every instruction is emulated: KVM within a virtual
/// machine fails on many hosts.
fn boot(kernel: &Kernel, archive: &Path) -> Result<Outcome> {
    let mut machine = Command::new("qemu-system-x86_64")
        .args(["-accel", "tcg", "-cpu", "max"])
        .args([
            "-smp",
            "2",
            "-m",
            MEMORY_MIB,
            "-nodefaults",
            "-no-user-config",
            "-no-reboot",
        ])
        .args(["-display", "none", "-serial", "stdio"])
        .arg("-kernel")
        .arg(&kernel.image)
        .arg("-initrd")
        .arg(archive)
        .args(["-append", "console=ttyS0 quiet panic=-1"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("starting qemu-system-x86_64")?;
    let outcome = read(&mut machine);
    let _ = machine.kill();
    machine.wait().context("waiting for the virtual machine")?;
    let outcome = outcome?;
    ensure!(
        outcome.has_ended,
        "the virtual machine ended before its tests did"
    );
    Ok(outcome)
}

/// Reads the machine's output until its end or the time limit.
fn read(machine: &mut Child) -> Result<Outcome> {
    let output = machine.stdout.take().context("the virtual machine's output")?;
    let (send, lines) = mpsc::channel();
    thread::spawn(move || {
        for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
            if send
                .send(String::from_utf8_lossy(&line).trim_end().to_owned())
                .is_err()
            {
                return;
            }
        }
    });
    let end = Instant::now() + TIME_LIMIT;
    let mut outcome = Outcome::default();
    loop {
        match lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
            Ok(line) => {
                println!("    {line}");
                outcome.take(&line);
            }
            Err(RecvTimeoutError::Disconnected) => return Ok(outcome),
            Err(RecvTimeoutError::Timeout) => {
                bail!("the virtual machine took longer than {} s", TIME_LIMIT.as_secs())
            }
        }
    }
}

impl Outcome {
    fn take(&mut self, line: &str) {
        if let Some(release) = line.strip_prefix("kernel ") {
            release.clone_into(&mut self.release);
        }
        self.counts.extend(count_of(line));
        if let Some(sum) = result_of(line) {
            self.sum.add(sum);
        }
        self.has_ended |= line == END;
    }
}

fn print_counts(here: &Counts, there: &Outcome) {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    println!("\nInstructions that the verifier looked at");
    println!("| program | {} | {} |", release.trim(), there.release);
    for (name, count) in here {
        let other = there
            .counts
            .get(name)
            .map_or("refused".to_owned(), u64::to_string);
        println!("| {name} | {count} | {other} |");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machines_output_says_kernel_counts_and_results() {
        let mut outcome = Outcome::default();
        let result =
            "test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 3 filtered out; finished in 1.00s";
        for line in [
            "[    1.2] kernel says something",
            "kernel 6.12.1-cloud",
            "test every_program … ... agent_tc: 1200 instructions verified",
            "xdp_pass: 2 instructions verified",
            result,
            result,
        ] {
            outcome.take(line);
        }
        let counts = [("agent_tc", 1200), ("xdp_pass", 2)].map(|(name, count)| (name.to_owned(), count));
        assert_eq!(outcome.counts, counts.into());
        assert_eq!((&*outcome.release, outcome.sum.passed), ("6.12.1-cloud", 2));
        assert!(!outcome.has_ended);
        outcome.take(END);
        assert!(outcome.has_ended);
    }
}
