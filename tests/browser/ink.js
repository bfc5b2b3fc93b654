// What is wrong with the words of some drawings in a column of so many pixels: a list of complaints for each drawing.
//
// Lengths in complaints and `tolerance` are in a drawing's own units, those in which its source places words.
({drawings, column, tolerance}) => {
    const pen = document.createElement('canvas').getContext('2d');
    const words = text => `"${text.textContent.trim().slice(0, 60)}"`;

    // The box around the letters of a text on the screen; null for one that is empty.
    const ink = text => {
        if (!text.textContent.trim()) return null;
        const style = getComputedStyle(text), last = text.getNumberOfChars() - 1;
        pen.font = `${style.fontStyle} ${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
        const letters = pen.measureText(text.textContent), matrix = text.getScreenCTM();
        const {x: left, y} = text.getStartPositionOfChar(0), right = text.getEndPositionOfChar(last).x;
        const corners = [[left, y - letters.actualBoundingBoxAscent], [right, y + letters.actualBoundingBoxDescent],
                         [left, y + letters.actualBoundingBoxDescent], [right, y - letters.actualBoundingBoxAscent]]
            .map(([x, y]) => new DOMPoint(x, y).matrixTransform(matrix));
        const xs = corners.map(corner => corner.x), ys = corners.map(corner => corner.y);
        return {left: Math.min(...xs), right: Math.max(...xs), top: Math.min(...ys), bottom: Math.max(...ys)};
    };
    const out = (inner, outer) => Math.max(outer.left - inner.left, inner.right - outer.right,
                                           outer.top - inner.top, inner.bottom - outer.bottom);
    const meet = (a, b) => [Math.min(a.right, b.right) - Math.max(a.left, b.left),
                            Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top)];

    // Points of an outline on the screen, one for each unit of its length; those of most outlines nobody asks for.
    const pointsOf = shape => {
        const matrix = shape.getScreenCTM(), length = shape.getTotalLength(), steps = Math.ceil(length) || 1;
        return Array.from({length: steps + 1}, (_, step) => {
            const point = shape.getPointAtLength(length * step / steps).matrixTransform(matrix);
            return {left: point.x, right: point.x, top: point.y, bottom: point.y};
        });
    };

    const sheet = document.createElement('div');
    sheet.style.width = `${column}px`;
    document.body.append(sheet);
    const complaints = drawings.map(drawing => {
        sheet.innerHTML = drawing;
        const svg = sheet.querySelector('svg'), page = svg.getBoundingClientRect(), unit = svg.getScreenCTM().a;
        const found = [], far = pixels => (pixels / unit).toFixed(1);
        if (page.width > column + 0.5) found.push(`${page.width} px wide in a column of ${column} px`);
        const shapes = [...svg.querySelectorAll('text, rect, circle, line, path')];
        const texts = [], strokes = [], grounds = [];
        shapes.forEach((shape, order) => {
            const style = getComputedStyle(shape);
            if (shape.tagName === 'text') {
                const box = ink(shape);
                if (box) texts.push({text: shape, box, order});
                return;
            }
            const box = shape.getBoundingClientRect();
            if (['rect', 'circle'].includes(shape.tagName) && style.fill !== 'none') grounds.push({box, order});
            const dots = style.strokeDasharray === '1px, 5px';  // the lines of a grid, which words are read through
            if (style.stroke !== 'none' && style.strokeOpacity !== '0' && style.strokeWidth !== '0px' && !dots)
                strokes.push({shape, box, order});
        });
        texts.forEach(({text, box, order}, k) => {
            if (out(box, page) > tolerance * unit)
                found.push(`${words(text)} leaves the picture by ${far(out(box, page))}`);
            const frame = text.parentElement === svg ? null :
                [...text.parentElement.children].filter(shape => shape.tagName === 'rect').pop();
            const over = frame ? out(box, frame.getBoundingClientRect()) : 0;
            if (over > tolerance * unit) found.push(`${words(text)} leaves its box by ${far(over)}`);
            for (const other of texts.slice(k + 1)) {
                const [across, down] = meet(box, other.box);
                if (across > tolerance * unit && down > tolerance * unit)
                    found.push(`${words(text)} and ${words(other.text)} overlap by ${far(across)} x ${far(down)}`);
            }
            // What is drawn before a ground on which the words stand is hidden by it.
            const ground = Math.max(-1, ...grounds.filter(
                below => below.order < order && out(box, below.box) <= tolerance * unit).map(below => below.order));
            for (const stroke of strokes) {
                const [across, down] = meet(box, stroke.box);
                const near = across > -unit && down > -unit && stroke.order > ground && stroke.shape !== frame;
                if (!near) continue;
                stroke.points ??= pointsOf(stroke.shape);
                if (stroke.points.some(point => out(point, box) < -tolerance * unit))
                    found.push(`a ${stroke.shape.tagName} crosses ${words(text)}`);
            }
        });
        return found;
    });
    sheet.remove();
    return complaints;
}
