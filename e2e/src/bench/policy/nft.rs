//! The same rules without Thuban: plain routing, and an nftables set of addresses at each end.

use std::{
    fmt::Write,
    io::Write as _,
    net::Ipv4Addr,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};

use crate::{
    bench::datapath::rigs::{Path, cable},
    rig::{namespace::Namespace, traffic::ping},
};

/// The pods of the rig, client and server.
pub const PODS: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 0, 1, 2), Ipv4Addr::new(10, 0, 2, 2)];

/// Makes the rig of plain routing, and with rules if there are addresses.
pub fn path(name: &str, addresses: Option<usize>) -> Result<Path> {
    let mut path = cable::path(cable::spec_of("plain-seg")?)?;
    name.clone_into(&mut path.name);
    let Some(count) = addresses else {
        return Ok(path);
    };
    for (node, [own, other]) in path.nodes.iter().zip([PODS, [PODS[1], PODS[0]]]) {
        apply(&node.namespace, &ruleset(own, count - 1, None)?)?;
        let passes = ping(&path.client, path.address, 56)?;
        ensure!(!passes, "a ping comes through, whatever the rules say");
        apply(&node.namespace, &ruleset(own, count - 1, Some(other))?)?;
        let passes = ping(&path.client, path.address, 56)?;
        ensure!(passes, "no ping comes through");
    }
    Ok(path)
}

/// Returns the rules of a node: its pod and the addresses of the set may begin connections with each other.
fn ruleset(pod: Ipv4Addr, count: usize, allowed: Option<Ipv4Addr>) -> Result<String> {
    let mut text = String::from(
        "table ip bench\ndelete table ip bench\ntable ip bench {\nset allowed {\ntype ipv4_addr\nelements = { 11.0.0.1",
    );
    for other in others(count)? {
        write!(text, ", {other}")?;
    }
    if let Some(allowed) = allowed {
        write!(text, ", {allowed}")?;
    }
    write!(
        text,
        " }}\n}}\nchain forward {{\ntype filter hook forward priority 0; policy drop;\n\
         ct state established,related accept\n\
         ip daddr {pod} ip saddr @allowed accept\nip saddr {pod} ip daddr @allowed accept\n}}\n}}\n"
    )?;
    Ok(text)
}

/// Returns addresses that no pod has.
pub fn others(count: usize) -> Result<impl Iterator<Item = Ipv4Addr>> {
    Ok((0..u32::try_from(count)?).map(|number| Ipv4Addr::from(0x0b00_0002 + number * 2)))
}

/// Gives nft a file in the namespace.
pub fn apply(namespace: &Namespace, ruleset: &str) -> Result<()> {
    namespace.run(|| {
        let mut nft = Command::new("nft")
            .args(["-f", "-"])
            .stdin(Stdio::piped())
            .spawn()
            .context("starting nft")?;
        nft.stdin
            .take()
            .context("no input of nft")?
            .write_all(ruleset.as_bytes())
            .context("writing to nft")?;
        ensure!(nft.wait()?.success(), "nft refused the rules");
        Ok(())
    })
}
