//! Limits of bandwidth at links of a rig, by transitd's own code.

use anyhow::{Context, Result};
use thuban_rows::ByteRate;
use transitd::netlink::{self, shaper};

use super::namespace::Namespace;

/// Limits what goes out by a link, as transitd does. `rate`: bytes per second.
pub fn limit(namespace: &Namespace, link: &str, rate: u64) -> Result<()> {
    let index = namespace.interface(link)?;
    let rate = ByteRate::new(rate).context("a rate")?;
    namespace.run(|| {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        runtime.block_on(async {
            let handle = netlink::connect()?;
            shaper::limit(&handle, (index, link), rate).await?;
            anyhow::Ok(())
        })
    })
}
