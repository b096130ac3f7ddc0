//! The matrix of pods that reach each other: every pod asks every other for its name, by TCP and UDP.

use std::time::Duration;

use anyhow::{Result, ensure};

use super::pods::Pod;

/// The same patience for those that must answer and those that must not. Longer than it takes until a lost first packet
/// is repeated.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(4);

/// The answers that one pod got at the address of another.
struct Finding<'a> {
    client: &'a Pod,
    server: &'a Pod,
    /// Names that answered: by TCP, by UDP.
    answers: [Option<String>; 2],
}

impl Finding<'_> {
    fn is_reached(&self, answer: Option<&str>) -> bool {
        answer == Some(&self.server.name)
    }

    fn is_as_expected(&self) -> bool {
        let expected = self.client.vpc == self.server.vpc;
        self.answers.iter().map(Option::as_deref).all(|answer| {
            let own = format!("{}-", self.client.vpc);
            let is_stranger = answer.is_some_and(|name| !name.starts_with(&own));
            self.is_reached(answer) == expected && !is_stranger
        })
    }
}

/// Asks, prints, and returns whether all is as expected.
pub fn show(pods: &[Pod], networks: &[&str]) -> Result<bool> {
    let findings = ask_all(pods);
    println!(
        "\nWho reaches whom (TCP and UDP; client rows, server columns; pairs of pods that reached, of all pairs)\n"
    );
    print!("  {:<12}", "");
    for server in networks {
        print!("{server:>12}");
    }
    println!();
    for client in networks {
        print!("  {client:<12}");
        for server in networks {
            let pairs: Vec<&Finding> = findings
                .iter()
                .filter(|finding| finding.client.network == *client && finding.server.network == *server)
                .collect();
            let reached = pairs
                .iter()
                .filter(|pair| {
                    pair.answers
                        .iter()
                        .all(|answer| pair.is_reached(answer.as_deref()))
                })
                .count();
            let mark = if pairs.iter().all(|pair| pair.is_as_expected()) {
                ""
            } else {
                "!"
            };
            print!("{:>12}", format!("{mark}{reached}/{}", pairs.len()));
        }
        println!();
    }
    println!("\n  expected: all pairs within a VPC, on any nodes; none between VPCs");
    let own = findings
        .iter()
        .filter(|finding| finding.client.vpc != finding.server.vpc)
        .filter(|finding| finding.answers.iter().flatten().count() > 0 && finding.is_as_expected())
        .count();
    println!(
        "  {own} times an address of another VPC was answered by the client's own VPC, which has it too"
    );
    let wrong: Vec<&Finding> = findings
        .iter()
        .filter(|finding| !finding.is_as_expected())
        .collect();
    for finding in &wrong {
        let [tcp, udp] = finding
            .answers
            .each_ref()
            .map(|answer| answer.as_deref().unwrap_or("nobody"));
        println!(
            "  NOT AS EXPECTED: {} asks {} of {}: TCP {tcp}, UDP {udp}",
            finding.client.name, finding.server.address, finding.server.name
        );
    }
    ensure!(
        findings.len() == pods.len() * (pods.len() - 1),
        "only {} pairs were asked",
        findings.len()
    );
    if wrong.is_empty() {
        println!("  found: as expected, {} pairs", findings.len());
    }
    Ok(wrong.is_empty())
}

/// Asks for all pairs except a pod with itself; clients run side by side.
fn ask_all(pods: &[Pod]) -> Vec<Finding<'_>> {
    std::thread::scope(|scope| {
        let clients: Vec<_> = pods
            .iter()
            .map(|client| scope.spawn(move || ask_from(client, pods)))
            .collect();
        clients
            .into_iter()
            .flat_map(|thread| thread.join().unwrap_or_default())
            .collect()
    })
}

fn ask_from<'a>(client: &'a Pod, pods: &'a [Pod]) -> Vec<Finding<'a>> {
    std::thread::scope(|scope| {
        let asked: Vec<_> = pods
            .iter()
            .filter(|server| server.name != client.name)
            .map(|server| {
                scope.spawn(move || {
                    let tcp = client.ask_tcp(server.address, ANSWER_TIMEOUT).ok();
                    let udp = client.ask_udp(server.address, ANSWER_TIMEOUT).ok();
                    Finding {
                        client,
                        server,
                        answers: [tcp, udp],
                    }
                })
            })
            .collect();
        asked
            .into_iter()
            .filter_map(|thread| thread.join().ok())
            .collect()
    })
}
